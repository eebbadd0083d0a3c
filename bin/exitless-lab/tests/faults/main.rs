//! Parts that fail on purpose (`--fault`), each seen to fail as whole processes: cores that panic,
//! swap stores that fail, disks that are slow or attack their guest; and what is refused.

mod panics;
mod paused;
mod program;
mod refusals;
mod slow;
