//! Both sides of one area, and a worker that keeps to nothing.

#[cfg(not(loom))]
mod both;
#[cfg(not(loom))]
mod hostile;
#[cfg(loom)]
mod sleep;
