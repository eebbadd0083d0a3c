//! See [`fuzz::block_requests`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::block_requests);
