//! See [`fuzz::worker_area`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::worker_area);
