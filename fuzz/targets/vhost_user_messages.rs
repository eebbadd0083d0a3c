//! See [`fuzz::vhost_user_messages`].
#![cfg_attr(fuzzing, no_main)]

fuzz::target!(fuzz::vhost_user_messages);
