//! The device model of a disk in a process of its own: how its owner starts it, watches it and
//! starts it again, and what that process does.
//!
//! The device in the owner's process is [`vio::caged`], the memory between the two
//! [`worker_area`], the code that checks and carries out requests [`vio::blk::BlkWorker`] (virtio
//! 1.2 §5.2); what the process gives up is [`confine`]. This crate puts them together, over Linux's
//! processes, sockets and eventfds:
//!
//! ```text
//! owner                                      worker
//! start ── thread ── exec of a program ────▶ main of that program ── serve
//!          descriptors over a socket ──────▶ other descriptors, namespaces, capabilities given up
//!          wait ◀─ facts of the disk ─────── disk opened, wrapped; limits, system calls given up
//! Running ─▶ Caged ── slots, eventfds ─────▶ loop: take, back end, answer; asleep where idle
//!          wait for its end, Report, and the next one, from its start
//! ```
//! [`start`] is called by the machine's builder, and returns when the worker serves. One thread for
//! each worker starts it and waits for its end; the device, on its sidecore, is notified of both by
//! events and an eventfd, and asks for the end by a signal. The kernel kills the worker when that
//! thread dies, so it outlives no owner, however that ends. Messages for an administrator go to a
//! callback ([`Report`]), which that thread calls.
//!
//! [`serve`] is called by the program that [`WorkerDisk`] names, first thing in its main thread. It
//! was started through exec, so nothing of the owner's memory is there. One thread takes requests
//! and answers them; four threads make the calls that wait for storage. There is no io_uring: what
//! a ring is asked for goes round the filter of system calls. Its hook wraps the back end before
//! the process is confined: for what a test or a measurement puts in its place.
//!
//! | file | what it has |
//! |---|---|
//! | `supervisor` | the owner's side: start, watch, restart |
//! | `worker` | the process: what it gives up, its loop |
//! | `descriptors` | sending and receiving them |
//! | `calls` | the system calls that are allowed |
//!
//! *Left out*: command lines and texts of messages, which are the programs'; backing files and
//! formats other than raw; other devices than disks.
//!
//! *Bounds*: 128 requests of a disk at a time; ten starts a second; three workers in a row that
//! answer nothing.
#![deny(unsafe_code)]

mod calls;
#[expect(
    unsafe_code,
    reason = "a number of a descriptor is borrowed; see the module"
)]
mod descriptors;
mod supervisor;
mod worker;

pub use supervisor::{Report, Running, StartError, WorkerConfig, WorkerDisk, start};
pub use worker::{Confined, LOOKS, Options, ServeError, serve};

/// An error of the host's, and what it was asked for.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct HostError {
    what: &'static str,
    source: std::io::Error,
}

impl HostError {
    /// For `map_err`: names what was asked for.
    fn of<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self {
            what,
            source: error.into(),
        }
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "attacks are system calls")]
mod tests;
