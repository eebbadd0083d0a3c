//! Seeds: well-behaved front ends, up to a point.

use crate::Script;

/// Seeds: each kind of device, with both layouts, and what may happen while it serves.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for device in 0..8 {
        for ending in 0..9 {
            seeds.push(seed(device, ending));
        }
    }
    seeds
}

fn seed(device: u8, ending: u8) -> Vec<u8> {
    let mut script = Script::new();
    script.u8(device);
    set_up(&mut script, device, 0);
    // Requests on both rings, of each kind.
    for (nth, kind) in [0, 1, 4, 8].into_iter().enumerate() {
        offer(&mut script, nth as u8, kind);
        script.u8(6).u8(5).u8(0);
        script.u8(8).u8(100);
    }
    script.u8(10).u8(1).u8(0).u8(8).u8(50);
    match ending {
        // Stop and start.
        0 => {
            script.u8(0).u8(7).u8(0);
            script.u8(10).u8(0).u8(0).u8(10).u8(0).u8(0).u8(8).u8(9);
            script.u8(0).u8(4).u8(0).u8(16).u16(4);
        }
        // Memory goes while requests are in flight, and comes back.
        1 => {
            script.u8(0).u8(2).u8(0);
            script
                .u8(12)
                .u8(20)
                .u8(8)
                .u8(9)
                .u8(10)
                .u8(0)
                .u8(0)
                .u8(8)
                .u8(9);
            script.u8(0).u8(1).u8(0);
        }
        // It is cut off.
        2 => {
            script.u8(6).u8(7).u8(0);
            offer(&mut script, 9, 0);
        }
        // A successor of a killed process.
        3 => {
            script.u8(15);
            script.u8(0).u8(9).u8(0);
            set_up(&mut script, device, 4);
            script.u8(8).u8(100);
        }
        4 => {
            script.u8(14).u8(0);
            set_up(&mut script, device, 4);
        }
        5 => {
            script.u8(0).u8(10).u8(8).u8(50).u8(12).u8(20).u8(8).u8(50);
        }
        6 => {
            script.u8(9).u8(13).u8(8).u8(50);
        }
        7 => {
            script.u8(0).u8(11).u8(0).u8(60);
            script.u8(0).u8(6).u8(0).u8(8).u8(9).u8(0).u8(6).u8(2);
        }
        // A request by its number: a new call descriptor.
        _ => {
            script
                .u8(0)
                .u8(13)
                .u8(13)
                .u8(0x99)
                .u8(8)
                .u64(0)
                .u8(14)
                .u8(1);
        }
    }
    script.end()
}

/// Features, memory, an inflight region, two rings.
fn set_up(script: &mut Script, device: u8, base: u16) {
    let packed = if device & 1 != 0 { 2 } else { 0 };
    script.u8(0).u8(0).u8(1 | packed | 0x2c);
    script.u8(0).u8(3).u8(0).u8(2);
    script.u8(0).u8(8).u8(2).u16(16);
    for index in 0..2 {
        script.u8(0).u8(4).u8(index).u8(16).u16(base);
    }
}

fn offer(script: &mut Script, nth: u8, kind: u8) {
    script.u8(6).u8(1).u8(nth & 1);
    // First descriptor, flags, header, kind, sector, one buffer: length and address.
    script.u8(3 * (nth / 2)).u8(1);
    script
        .u16(0x2000 + 0x40 * u16::from(nth))
        .u8(kind)
        .u8(2)
        .u8(1);
    script.u16(512).u16(0x2800);
}

/// Front ends that are IOMMUs, and mean well up to a point.
pub(crate) fn translated_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for device in 0..8 {
        for ending in 0..8 {
            let mut script = Script::new();
            script.u8(device);
            // Steps of the plain script are even ones here.
            let mut step = |bytes: &mut Script| {
                script.u8(0).bytes(&bytes.end());
                // And all that is asked for comes.
                script.u8(1).u8(0).u8(1).u8(0);
            };
            let packed = if device & 1 != 0 { 2 } else { 0 };
            step(Script::new().u8(0).u8(0).u8(1 | packed | 0x2c));
            step(Script::new().u8(0).u8(3).u8(0).u8(2));
            for index in 0..2 {
                step(Script::new().u8(0).u8(4).u8(index).u8(16).u16(0));
            }
            for (nth, kind) in [0, 1, 4].into_iter().enumerate() {
                let mut request = Script::new();
                offer(&mut request, nth as u8, kind);
                step(&mut request);
                step(Script::new().u8(6).u8(5).u8(0));
            }
            match ending {
                0 => script.u8(1).u8(5).u16(0).u16(0),
                1 => script.u8(1).u8(5).u16(0x200).u16(0x100),
                2 => script.u8(1).u8(6).u16(0x280).u16(0xfff).u16(0x100).u8(3),
                3 => script.u8(1).u8(4).u8(1),
                4 => script.u8(1).u8(9).u8(0),
                5 => script.u8(0).u8(12).u8(255).u8(0).u8(12).u8(255),
                6 => script.u8(0).u8(0).u8(2).u8(0),
                _ => script
                    .u8(1)
                    .u8(8)
                    .u64(0)
                    .u64(0x1000)
                    .u64(0x7f00_0000_0000)
                    .u64(0x203),
            };
            // After any of these, requests go on.
            let mut request = Script::new();
            offer(&mut request, 5, 0);
            script.u8(0).bytes(&request.end());
            script
                .u8(0)
                .u8(10)
                .u8(0)
                .u8(0)
                .u8(1)
                .u8(0)
                .u8(0)
                .u8(8)
                .u8(90);
            seeds.push(script.end());
        }
    }
    seeds
}
