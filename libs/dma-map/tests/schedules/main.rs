//! The parts of the crate that cores share, under random schedules of four to eight threads,
//! through the public interface alone (`random_schedules` describes the method and its limits). Run
//! with
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle \
//!     cargo test -p dma-map --release --test schedules
//! ```
#![cfg(shuttle)]

mod barrier;
mod combine;
mod mapper;
mod reuse;
mod table;
mod twice;
