//! See [`fuzz::iova_allocators`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::iova_allocators);
