//! See [`fuzz::self_test`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::self_test);
