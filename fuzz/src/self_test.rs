//! A planted fault behind a four-byte word and a comparison of two bytes: found in seconds with
//! coverage and traced comparisons, never by chance (one input in 2^32 and more).

use std::hint::black_box;

/// Word that the input must begin with.
const MAGIC: u32 = 0x6b1d_94f3;

/// The body.
///
/// # Panics
/// On the planted input.
pub fn run(data: &[u8]) {
    let Some((&word, rest)) = data.split_first_chunk::<4>() else {
        return;
    };
    if u32::from_le_bytes(word) != black_box(MAGIC) {
        return;
    }
    // A second step, which only coverage of the first leads to.
    if let [first, second, ..] = rest
        && black_box(*first) ^ 0x5a == *second
    {
        panic!("the planted fault");
    }
}

/// Nothing that helps.
pub fn seeds() -> Vec<Vec<u8>> {
    vec![vec![0; 8]]
}
