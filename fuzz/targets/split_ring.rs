//! See [`fuzz::split_ring`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::split_ring);
