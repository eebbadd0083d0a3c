//! Delivery of a frame by the crate under test.

use net_offload::{Checked, Delivery, FrameBytes, HeaderError, HeaderRoom, NetHeader, Offloads};

use super::Expected;

/// Has a frame checked and delivered to each of `receivers` in turn.
pub fn delivered(
    header: &NetHeader,
    frame: &(impl FrameBytes + ?Sized),
    sender: Offloads,
    receivers: &[Offloads],
) -> Result<Vec<Vec<Expected>>, HeaderError> {
    let mut room = HeaderRoom::new();
    let mut checked = Checked::check(header, frame, sender, &mut room)?;
    let mut all = Vec::new();
    for &receiver in receivers {
        let count = checked.count(receiver);
        let got = one(&mut checked, frame, receiver);
        assert_eq!(got.len(), count, "the number that was announced");
        all.push(got);
    }
    Ok(all)
}

fn one(
    checked: &mut Checked<'_>,
    frame: &(impl FrameBytes + ?Sized),
    receiver: Offloads,
) -> Vec<Expected> {
    let mut bytes = vec![0; frame.frame_len()];
    frame.copy_to(0, &mut bytes);
    match checked.deliver(receiver) {
        Delivery::Unchanged(one) => {
            bytes[..one.headers.len()].copy_from_slice(one.headers);
            vec![Expected {
                gso_type: one.header.gso_type,
                needs_checksum: one.header.flags & NetHeader::NEEDS_CSUM != 0,
                bytes,
            }]
        }
        Delivery::Checksum(partial) => {
            let sum = partial.complete(frame);
            bytes[partial.position()..][..2].copy_from_slice(&sum.to_be_bytes());
            vec![Expected {
                gso_type: NetHeader::default().gso_type,
                needs_checksum: false,
                bytes,
            }]
        }
        Delivery::Segments(mut segments) => {
            let mut got = Vec::new();
            while let Some(mut segment) = segments.next() {
                segment.complete(frame);
                let mut bytes = segment.headers().to_vec();
                let payload = segment.payload();
                frame.pieces(payload, &mut |piece| bytes.extend(piece));
                assert_eq!(bytes.len(), segment.frame_len());
                got.push(Expected {
                    gso_type: segment.header().gso_type,
                    needs_checksum: segment.header().flags & NetHeader::NEEDS_CSUM != 0,
                    bytes,
                });
            }
            assert_eq!(segments.remaining(), 0);
            got
        }
    }
}
