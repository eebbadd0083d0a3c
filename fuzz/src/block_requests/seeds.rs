//! Requests as drivers make them.

use crate::Script;

/// Addresses of the seeds' rings: descriptors, available and used ring.
const RINGS: [u16; 3] = [0, 0x400, 0x600];
/// Addresses of their headers and data.
const HEADER: u16 = 0x1000;
const DATA: u16 = 0x2000;
/// Upper bit of a length: the device writes it.
const WRITE: u16 = 0x8000;

/// Seeds for both ways.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for features in [0x1f, 0x1d, 0x00] {
        let mut script = steps(features, 4);
        for (kind, buffers) in requests() {
            offer(&mut script, 0, kind, &buffers);
            script.u8(2);
        }
        seeds.push(script.end());
    }
    for (kind, buffers) in requests() {
        let mut script = steps(0x1f, 3);
        for head in [0, 3, 6] {
            offer(&mut script, head, kind, &buffers);
        }
        script.u8(2).u8(2).u8(6).u8(2).u8(5).u8(2);
        seeds.push(script.end());
    }
    seeds.push(indirect());
    for disk in [0x20, 0x21, 0x22, 0xf2, 0x80] {
        for features in [0x1f, 0x3f, 0x5f, 0x7f] {
            seeds.push(in_flight(features, disk));
        }
    }
    seeds
}

/// Kinds, with the buffers behind the header: address and length.
fn requests() -> Vec<(u8, Vec<(u16, u16)>)> {
    let status = (HEADER + 0x40, 1 | WRITE);
    vec![
        (
            0,
            vec![(DATA, 512 | WRITE), (DATA + 0x400, 1024 | WRITE), status],
        ),
        (1, vec![(DATA, 512), (DATA + 0xe00, 1024), status]),
        (4, vec![status]),
        (8, vec![(DATA, 20 | WRITE), status]),
        (11, vec![(HEADER + 0x20, 16), status]),
        (13, vec![(HEADER + 0x20, 16), status]),
        (0, vec![(DATA, 513 | WRITE)]),
    ]
}

fn steps(features: u8, log_size: u8) -> Script {
    let mut script = Script::new();
    script.u8(0).u8(features).u8(log_size);
    for at in RINGS {
        script.u16(at);
    }
    // The range of a discard: sector 2, 3 sectors.
    store(
        &mut script,
        HEADER + 0x20,
        &[2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0],
    );
    script
}

fn store(script: &mut Script, at: u16, bytes: &[u8]) {
    script.u8(0).u16(at).u8(bytes.len() as u8).bytes(bytes);
}

fn offer(script: &mut Script, head: u8, kind: u8, buffers: &[(u16, u16)]) {
    script.u8(1).u8(head).u16(HEADER).u8(kind).u8(2);
    script.u8(buffers.len() as u8);
    for &(at, len) in buffers {
        script.u16(at).u16(len);
    }
}

fn desc(script: &mut Script, addr: u64, len: u32, flags: u16, next: u16) {
    script.u64(addr).u32(len).u16(flags).u16(next);
}

/// A read whose descriptors lie in a table.
fn indirect() -> Vec<u8> {
    let mut script = steps(0x1f, 3);
    store(&mut script, HEADER, &[0; 16]);
    script.u8(0).u16(0x1800).u8(48);
    desc(&mut script, HEADER.into(), 16, 1, 1);
    desc(&mut script, DATA.into(), 512, 3, 2);
    desc(&mut script, u64::from(HEADER) + 0x40, 1, 2, 0);
    script.u8(0).u16(RINGS[0]).u8(16);
    desc(&mut script, 0x1800, 48, 4, 0);
    store(&mut script, RINGS[1], &[0, 0, 1, 0, 0, 0]);
    script.u8(2).u8(2).end()
}

/// Requests in flight, ends in another order, a race, a stop.
fn in_flight(features: u8, disk: u8) -> Vec<u8> {
    let mut script = Script::new();
    script.u8(1).u8(features).u8(disk);
    for at in RINGS {
        script.u16(at);
    }
    script.u8(16);
    for (nth, kind) in [0, 1, 4, 8].into_iter().enumerate() {
        // Head, flags (available in the first lap), header, kind, sector, one data buffer of 512
        // bytes.
        script.u8(1).u8(3 * nth as u8).u8(1);
        script.u16(HEADER + 0x100 * nth as u16).u8(kind).u8(2).u8(1);
        script.u16(512).u16(DATA + 0x200 * nth as u16);
    }
    script.u8(3).u8(100);
    script.u8(5).u8(1).u8(0);
    script.u8(3).u8(100);
    // A store to the available index after ten accesses.
    script.u8(9).u8(1).u8(10).u16(RINGS[1] + 2).u8(1).u8(4);
    script.u8(5).u8(0).u8(2).u8(3).u8(100).u8(8);
    script.u8(11).u8(0).u8(11).u8(3).u8(3).u8(9).u8(11).u8(4);
    script.end()
}
