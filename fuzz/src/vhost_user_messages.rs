//! Any bytes, with descriptors anywhere, as a front end may send them: [`session_bytes::feed`] says
//! how the input is read and what must hold. Here the process's descriptors are counted as well.

use std::fs::File;
use std::os::fd::OwnedFd;

use vhost_user::backend::SUPPORTED;
use vhost_user::wire::{
    ConfigAccess, ConfigKind, Inflight, MemRegion, Message, Request, VringAddr, VringFd,
    VringState, feature,
};

use crate::fds;

/// The body.
///
/// # Panics
/// If a session breaks one of its promises.
pub fn run(data: &[u8]) {
    fds::leaves_none(|| session_bytes::feed(data));
}

/// Returns the messages of known clients, whole and in their order, and each request alone.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![
        conversation(0, qemu(0)),
        conversation(0, qemu(feature::RING_PACKED)),
        conversation(0x55, qemu(0)),
        conversation(0, old()),
    ];
    seeds.extend(rare().into_iter().map(|request| {
        let mut requests = qemu(feature::RING_PACKED | feature::ACCESS_PLATFORM);
        requests.push(request);
        conversation(0, requests)
    }));
    seeds
}

/// An input: which events are refused, then the messages, in chunks of at most 63 bytes.
fn conversation(refuse: u8, requests: Vec<Request>) -> Vec<u8> {
    let mut data = vec![refuse];
    for request in requests {
        let message = request.encode(true);
        chunks(&message, &mut data);
    }
    data
}

fn chunks(message: &Message, data: &mut Vec<u8>) {
    let mut fds = message.fds.len() as u8;
    for chunk in message.to_bytes().chunks(63) {
        // What is left of them comes with the next chunk.
        let with = fds.min(3);
        fds -= with;
        data.push(with << 6 | chunk.len() as u8);
        data.extend(chunk);
    }
}

fn fd() -> OwnedFd {
    File::open("/dev/null")
        .expect("there is a /dev/null")
        .into()
}

fn kick(index: u8) -> VringFd {
    VringFd {
        index,
        fd: Some(fd()),
    }
}

const fn state(index: u32, num: u32) -> VringState {
    VringState { index, num }
}

/// Two regions with different user addresses.
const REGIONS: [MemRegion; 2] = [
    MemRegion {
        guest_addr: 0,
        size: 0x10_0000,
        user_addr: 0x7f00_0000_0000,
        mmap_offset: 0,
    },
    MemRegion {
        guest_addr: 0x10_0000,
        size: 0x10_0000,
        user_addr: 0x7f10_0000_0000,
        mmap_offset: 0x1000,
    },
];

fn place(index: u32) -> VringAddr {
    let base = REGIONS[0].user_addr + 0x4000 * u64::from(index);
    VringAddr {
        index,
        desc: base,
        avail: base + 0x1000,
        used: base + 0x2000,
    }
}

/// Returns QEMU's messages, with two rings that start and stop.
fn qemu(features: u64) -> Vec<Request> {
    let mut requests = vec![
        Request::GetFeatures,
        Request::GetProtocolFeatures,
        Request::SetProtocolFeatures(SUPPORTED),
        Request::GetQueueNum,
        Request::NetSetMtu(1500),
        Request::SendRarp(0x0000_0605_0403_0202),
        Request::GetMaxMemSlots,
        Request::SetBackendReqFd(fd()),
        Request::SetOwner,
        Request::SetFeatures(features | 0x20 | feature::PROTOCOL_FEATURES),
        Request::AddMemReg(REGIONS[0], fd()),
        Request::AddMemReg(REGIONS[1], fd()),
    ];
    for index in 0..2_u8 {
        let ring = u32::from(index);
        requests.extend([
            Request::SetVringCall(kick(index)),
            Request::SetVringErr(kick(index)),
            Request::SetVringNum(state(ring, 128)),
            Request::SetVringBase(state(ring, 0)),
            Request::SetVringAddr(place(ring)),
            Request::SetVringKick(kick(index)),
            Request::SetVringEnable {
                index: ring,
                enable: true,
            },
        ]);
    }
    requests.push(Request::GetVringBase { index: 0 });
    requests
}

/// Returns messages from before protocol features: one table, rings live from the kick on.
fn old() -> Vec<Request> {
    vec![
        Request::SetOwner,
        Request::GetFeatures,
        Request::SetFeatures(0x20),
        Request::SetMemTable(REGIONS.into_iter().map(|region| (region, fd())).collect()),
        Request::SetVringNum(state(0, 256)),
        Request::SetVringBase(state(0, 65_535)),
        Request::SetVringAddr(place(0)),
        Request::SetVringKick(VringFd { index: 0, fd: None }),
        Request::SetVringCall(kick(0)),
        Request::GetVringBase { index: 0 },
        Request::ResetOwner,
    ]
}

/// Returns the requests that clients send now and then.
fn rare() -> Vec<Request> {
    let access = ConfigAccess {
        offset: 0,
        size: 60,
        kind: ConfigKind::Writable,
    };
    let inflight = Inflight {
        mmap_size: 0,
        mmap_offset: 0,
        queues: 2,
        queue_size: 128,
    };
    let region = Inflight {
        mmap_size: 4096,
        ..inflight
    };
    vec![
        Request::GetConfig(access),
        Request::SetConfig(access, vec![1; 60]),
        Request::GetInflightFd(inflight),
        Request::SetInflightFd(region, fd()),
        Request::ResetDevice,
        Request::RemMemReg(REGIONS[1]),
        Request::SetVringEnable {
            index: 1,
            enable: false,
        },
        Request::SetVringBase(state(0, 0x8004_0005)),
    ]
}
