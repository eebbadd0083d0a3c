//! See [`fuzz::dma_mapper`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::dma_mapper);
