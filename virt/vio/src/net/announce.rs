//! Announcing an address on its driver's behalf: a reverse ARP request from it, by which switches
//! learn where it is now (RFC 903; what QEMU sends for a guest that cannot).

use guest_mem::{Gpa, GuestRam, Intent, PhysMem, VolatileSlice};
use net_offload::NetHeader;

use super::filter::Mac;
use super::port::{NetPort, TxFrame};

/// Length of the frame: the shortest that Ethernet has.
const LEN: usize = 60;

/// The frame.
fn frame(mac: &Mac) -> [u8; LEN] {
    // Broadcast, from the address; type RARP; hardware Ethernet, protocol IPv4, lengths, operation
    // 3: request reverse.
    let head = [
        &[0xff; 6][..],
        mac,
        &[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3],
        mac,
        &[0; 4],
        mac,
        &[0; 4],
    ];
    let head = head.concat();
    let mut frame = [0; LEN];
    frame[..head.len()].copy_from_slice(&head);
    frame
}

/// Sends it to `port`, and returns whether that took it. Called once in a migration or a
/// reconnection: it allocates.
pub(super) fn send(port: &mut dyn NetPort, mac: &Mac) -> bool {
    let can = port.capabilities();
    let keeps = can.keeps_frames && can.copies_up_to < LEN as u32;
    if keeps || port.send_room(0) == 0 {
        return false;
    }
    // Ports take frames from where memory of guests is: a page of one that has nothing else.
    let Ok(ram) = GuestRam::in_heap(&[(Gpa::new(0), 4096)]) else {
        return false;
    };
    let keep = ram.keep_alive();
    let at = ram.host(Gpa::new(0), LEN as u64, Intent::Read);
    let slice = at
        .ok()
        .and_then(|hva| VolatileSlice::new(&keep, hva, LEN as u32));
    let Some(slice) = slice else {
        return false;
    };
    slice.write(0, &frame(mac));
    let frame = TxFrame {
        header: NetHeader::PLAIN,
        len: LEN as u32,
        data: &[slice],
    };
    port.send(0, &[frame], &keep) == 0
}
