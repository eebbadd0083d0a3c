//! See [`fuzz::vfio_info`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::vfio_info);
