//! `make bench-dma`: what IOVA allocation and DMA mapping cost on this machine.
#![forbid(unsafe_code)]

mod alloc;
mod measure;

fn main() {}
