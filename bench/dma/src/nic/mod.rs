//! A load as a network card's driver makes it: the share of the throughput without protection that
//! each policy reaches.
//!
//! Per core a receive ring of 512 buffers, refilled one by one as packets arrive, and transmissions
//! that complete in bursts of 32; half of the packets each way. Between its unmap and its next use
//! a buffer is held for a geometric time. Which pages buffers lie in is replayed from a recording
//! of a stock kernel (`traces/`), or forced to return with a given chance. Every packet is summed
//! and copied; at 1,500 B the work is padded to 500 ns, the larger and the smaller ones take as
//! long as they take.

pub mod load;
pub mod section;
pub mod sequence;
pub mod work;
