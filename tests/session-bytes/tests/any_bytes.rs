//! Any bytes, and bytes that nearly make sense.

use proptest::prelude::*;

use session_bytes::feed;

/// A message with a plausible header, cut into the fuzzer's chunks.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let small = prop_oneof![0..4_u32, Just(128), Just(256), any::<u32>()];
    (
        1..42_u32,
        0..4_u8,
        prop::collection::vec(small, 0..12),
        any::<bool>(),
    )
        .prop_map(|(request, fds, words, acks)| {
            let payload: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let flags: u32 = if acks { 9 } else { 1 };
            let mut bytes = Vec::new();
            for word in [request, flags, payload.len() as u32] {
                bytes.extend_from_slice(&word.to_ne_bytes());
            }
            bytes.extend_from_slice(&payload);
            let mut chunk = vec![fds << 6 | bytes.len() as u8];
            chunk.extend(bytes);
            chunk
        })
}

proptest! {
    #[test]
    fn any_bytes_end_in_defined_ways(data: Vec<u8>) {
        feed(&data);
    }

    #[test]
    fn any_sequence_of_plausible_messages_ends_in_defined_ways(
        refuse: u8,
        messages in prop::collection::vec(plausible(), 0..60),
    ) {
        let mut data = vec![refuse];
        // All protocol features first, so that refusals are replied to and the session goes on.
        data.extend([20, 16, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0x29, 0xb2, 0, 0, 0, 0, 0, 0]);
        data.extend(messages.concat());
        feed(&data);
    }
}
