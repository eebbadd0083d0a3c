//! See [`fuzz::frame_offloads`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::frame_offloads);
