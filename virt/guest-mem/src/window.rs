//! A cached pointer into guest memory (contract; body by the crate's author).
use crate::access::Perm;
use crate::addr::{Hva, Iova};
use crate::phys::KeepAlive;

/// A cached translation of a few bytes inside one mapping, checked by generation.
#[derive(Clone)]
pub struct Window {
    pub(crate) iova: Iova,
    pub(crate) len: u32,
    pub(crate) perm: Perm,
    pub(crate) hva: Hva,
    pub(crate) generation: u64,
    pub(crate) keep: KeepAlive,
}
