//! Fuzz target [`fuzz::iommu_requests`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::iommu_requests);
