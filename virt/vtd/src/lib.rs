//! (head comment to be written)
