//! The load of a network card's driver: throughput under each policy, as a share of the throughput
//! without protection.
//!
//! Each core has a receive ring of 512 buffers, refilled one by one as packets arrive, and
//! transmissions that complete in bursts of 32. Half of the packets are received, half sent.
//! Between its unmap and its next use a buffer is held for a geometrically distributed time. The
//! pages of buffers are replayed from a recording of a stock kernel (`traces/`), or are forced to
//! recur with a given probability. Every packet is summed and copied. For packets of 1,500 B the
//! work is padded to 500 ns; smaller and larger ones take as long as they take.

pub mod load;
pub mod section;
pub mod sequence;
pub mod work;
