//! See [`fuzz::iotlb_messages`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::iotlb_messages);
