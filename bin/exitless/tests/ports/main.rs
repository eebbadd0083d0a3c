//! Ports of network devices of `exitless serve`: TAP interfaces of the host, in network namespaces
//! that a test makes, and captures. The front end is `vhost-net`, which has no VM; a host's TCP and
//! UDP are the kernel's.
//!
//! Skipped, with the reason, where there can be no namespace: that takes root.

mod captures;
mod namespace;
mod served;
mod tap;
mod traffic;
