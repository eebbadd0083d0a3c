//! DMA mapping: a mapper of `dma-map` under each policy, on hardware that takes a fixed time for a
//! command.

pub mod linux;
pub mod loops;
pub mod no_table;
pub mod policies;
pub mod rig;
pub mod section;
