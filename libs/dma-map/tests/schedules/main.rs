//! The parts of the crate that cores share, under random schedules of four to eight threads
//! (`random_schedules` says how and what that cannot see). Through the public interface alone. Run
//! with
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle cargo test -p dma-map --release --test schedules
//! ```
#![cfg(shuttle)]

mod barrier;
mod combine;
mod mapper;
mod reuse;
mod table;
mod twice;
