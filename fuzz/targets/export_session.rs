//! See [`fuzz::export_session`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::export_session);
