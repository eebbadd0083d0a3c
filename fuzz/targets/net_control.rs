//! Fuzz target [`fuzz::net_control`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::net_control);
