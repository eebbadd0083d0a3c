//! See [`fuzz::packed_ring`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::packed_ring);
