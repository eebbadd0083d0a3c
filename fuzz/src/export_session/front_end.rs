//! A VMM and its guest, as well or ill behaved as the input says.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use guest_mem::Iova;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost_user::channel::{DEFAULT_MAX_PAYLOAD, Receiver, Sender};
use vhost_user::frontend::Reply;
use vhost_user::wire::{
    ConfigAccess, ConfigKind, Head, Inflight, MemRegion, Message, ProtocolFeatures, Request,
    RequestId, VringAddr, VringFd, VringState, feature,
};
use vio::QueueConfig;

use super::FILE_NAME;
use super::translations::Translations;
use crate::Input;
use crate::offer::{Memory, offer};

/// Bytes of each memory file.
const FILE_LEN: u64 = 0x4000;
/// Regions that the front end describes; the last two are wrong.
const REGIONS: [MemRegion; 5] = [
    region(0, FILE_LEN, 0),
    region(FILE_LEN, 0x2000, 0x2000),
    region(0x2_0000, 0x1000, 0),
    region(0x3_0000, FILE_LEN + 0x1000, 0),
    region(0x1000, 0x1000, 0),
];
/// Address of the guest's memory in the front end.
const USER: u64 = 0x7f00_0000_0000;

const fn region(guest_addr: u64, size: u64, mmap_offset: u64) -> MemRegion {
    MemRegion {
        guest_addr,
        size,
        user_addr: USER + guest_addr,
        mmap_offset,
    }
}

pub(super) struct FrontEnd {
    socket: Option<UnixStream>,
    sender: Sender,
    receiver: Receiver,
    files: [OwnedFd; 2],
    kicks: [OwnedFd; 2],
    call: OwnedFd,
    /// Rings as last described.
    queues: [QueueConfig; 2],
    is_packed: bool,
    inflight: Option<(Inflight, OwnedFd)>,
    /// Its translations, where it is an IOMMU too.
    translations: Option<Translations>,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor")
}

fn memory_file() -> OwnedFd {
    let file = memfd_create(FILE_NAME, MemfdFlags::CLOEXEC).expect("a memory file");
    ftruncate(&file, FILE_LEN).expect("room for it");
    file
}

fn again(fd: &OwnedFd) -> OwnedFd {
    fd.try_clone().expect("a descriptor")
}

impl FrontEnd {
    pub(super) fn new(address: &SocketAddr) -> Self {
        let queue = |index: u16| {
            let base = u64::from(index) * 0x1000;
            QueueConfig {
                index,
                size: 16,
                desc: Iova::new(base),
                avail: Iova::new(base + 0x400),
                used: Iova::new(base + 0x600),
            }
        };
        Self {
            socket: UnixStream::connect_addr(address).ok(),
            sender: Sender::default(),
            receiver: Receiver::new(DEFAULT_MAX_PAYLOAD),
            files: [memory_file(), memory_file()],
            kicks: [event(), event()],
            call: event(),
            queues: [queue(0), queue(1)],
            is_packed: false,
            inflight: None,
            translations: None,
        }
    }

    pub(super) fn disconnect(&mut self) {
        self.socket = None;
        self.translations = None;
        self.sender = Sender::default();
        self.receiver = Receiver::new(DEFAULT_MAX_PAYLOAD);
    }

    pub(super) fn reconnect(&mut self, address: &SocketAddr) {
        let is_translated = self.translations.is_some();
        self.disconnect();
        self.socket = UnixStream::connect_addr(address).ok();
        if is_translated {
            self.translate();
        }
    }

    /// Negotiates translations, and gives a channel.
    pub(super) fn translate(&mut self) {
        let (translations, channel) = Translations::new(USER);
        self.translations = Some(translations);
        let protocol = ProtocolFeatures::MQ
            | ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::BACKEND_REQ
            | ProtocolFeatures::INFLIGHT_SHMFD
            | ProtocolFeatures::CONFIGURE_MEM_SLOTS;
        self.ask(Request::SetProtocolFeatures(protocol));
        self.ask(Request::SetBackendReqFd(channel));
        let features = feature::PROTOCOL_FEATURES | feature::ACCESS_PLATFORM;
        self.ask(Request::SetFeatures(features | vio::feature::VERSION_1));
    }

    /// One step as an IOMMU.
    pub(super) fn iotlb(&mut self, input: &mut Input<'_>) {
        if let Some(translations) = &mut self.translations {
            let messages = translations.step(input);
            messages.into_iter().for_each(|message| self.push(message));
        }
    }

    /// Takes the replies, and keeps what is for keeping.
    pub(super) fn receive(&mut self) {
        let Some(socket) = &self.socket else { return };
        while let Ok(Some(message)) = self.receiver.receive(socket) {
            let request = message.head.request;
            if let Ok(Reply::Inflight(Some(kept))) = Reply::decode(request, message)
                && request == RequestId::GET_INFLIGHT_FD
            {
                self.inflight = Some(kept);
            }
        }
    }

    fn push(&mut self, message: Message) {
        let Some(socket) = &self.socket else { return };
        // An error: the other side has closed, or does not read.
        let _ = self
            .sender
            .push(message)
            .and_then(|()| self.sender.flush(socket).map(drop));
    }

    fn ask(&mut self, request: Request) {
        self.push(request.encode(true));
    }

    /// One message, or the few that set something up.
    pub(super) fn send(&mut self, input: &mut Input<'_>) {
        match input.u8() % 14 {
            0 => self.negotiate(input.u8()),
            1 => {
                let which = input.u8();
                let fd = self.file(which >> 4);
                self.ask(Request::AddMemReg(REGIONS[usize::from(which) % 5], fd));
            }
            2 => {
                let which = input.u8();
                self.ask(Request::RemMemReg(REGIONS[usize::from(which) % 5]));
            }
            3 => {
                let (first, count) = (input.u8(), input.u8() % 5);
                let table = (0..count).map(|nth| {
                    let which = first.wrapping_add(nth);
                    (REGIONS[usize::from(which) % 5], self.file(which >> 4))
                });
                let table = table.collect();
                self.ask(Request::SetMemTable(table));
            }
            4 | 5 => self.start_ring(input),
            6 => {
                let what = input.u8();
                self.ask(Request::SetVringEnable {
                    index: u32::from(what & 1),
                    enable: what & 2 != 0,
                });
            }
            7 => {
                let index = u32::from(input.u8() & 1);
                self.ask(Request::GetVringBase { index });
            }
            8 => {
                let (queues, queue_size) = (u16::from(input.u8()), input.u16());
                self.ask(Request::GetInflightFd(Inflight {
                    mmap_size: 0,
                    mmap_offset: 0,
                    queues,
                    queue_size,
                }));
            }
            9 => {
                let how = input.u8();
                let Some((mut inflight, fd)) = self
                    .inflight
                    .as_ref()
                    .map(|(inflight, fd)| (*inflight, again(fd)))
                else {
                    return;
                };
                match how % 8 {
                    1 => inflight.mmap_size /= 2,
                    2 => inflight.queue_size += 1,
                    3 => inflight.mmap_offset = 0x1000,
                    _ => {}
                }
                self.ask(Request::SetInflightFd(inflight, fd));
            }
            10 => self.ask(Request::ResetDevice),
            11 => {
                let access = ConfigAccess {
                    offset: input.u8().into(),
                    size: input.u8().into(),
                    kind: ConfigKind::Writable,
                };
                self.ask(Request::GetConfig(access));
            }
            12 => {
                // Bytes that may be no message at all.
                let len = input.u8();
                let bytes = input.bytes(len.into());
                if let Some(socket) = &mut self.socket {
                    let _ = socket.set_nonblocking(true);
                    let _ = socket.write(bytes);
                }
            }
            _ => self.any_message(input),
        }
    }

    fn file(&self, which: u8) -> OwnedFd {
        match which % 8 {
            0..=4 => again(&self.files[0]),
            5 | 6 => again(&self.files[1]),
            _ => File::open("/dev/null").expect("it exists").into(),
        }
    }

    /// A request of any number, payload and descriptors.
    fn any_message(&mut self, input: &mut Input<'_>) {
        let request = RequestId(u32::from(input.u8() % 43));
        let flags = input.u8();
        let count = flags >> 4 & 3;
        let len = input.u8();
        let payload = input.bytes(len.into()).to_vec();
        let head = Head {
            request,
            flags: u32::from(flags & 0xf),
        };
        let fds = (0..count).map(|nth| match (flags >> 6) + nth {
            0 => self.file(0),
            1 => again(&self.kicks[0]),
            2 => self.file(7),
            _ => again(&self.call),
        });
        let fds = fds.collect();
        self.push(Message { head, payload, fds });
    }

    fn negotiate(&mut self, choice: u8) {
        let mut protocol = ProtocolFeatures::MQ
            | ProtocolFeatures::REPLY_ACK
            | ProtocolFeatures::CONFIG
            | ProtocolFeatures::INFLIGHT_SHMFD
            | ProtocolFeatures::RESET_DEVICE
            | ProtocolFeatures::CONFIGURE_MEM_SLOTS;
        let mut features = vio::feature::VERSION_1;
        if self.translations.is_some() {
            protocol = protocol | ProtocolFeatures::BACKEND_REQ;
            features |= feature::ACCESS_PLATFORM;
        }
        for (bit, feature) in [
            feature::PROTOCOL_FEATURES,
            vio::feature::RING_PACKED,
            vio::feature::EVENT_IDX,
            vio::feature::INDIRECT_DESC,
            vio::feature::IN_ORDER,
            // FLUSH, DISCARD, WRITE_ZEROES
            0x6200,
        ]
        .into_iter()
        .enumerate()
        {
            if choice & 1 << bit != 0 {
                features |= feature;
            }
        }
        self.is_packed = features & vio::feature::RING_PACKED != 0;
        if choice & 0x40 == 0 {
            self.ask(Request::SetProtocolFeatures(protocol));
        }
        self.ask(Request::SetFeatures(features));
    }

    /// From SET_VRING_NUM to SET_VRING_KICK, and the enable.
    fn start_ring(&mut self, input: &mut Input<'_>) {
        let how = input.u8();
        let nth = usize::from(how & 1);
        let index = u32::from(how & 1);
        let size = u16::from(input.u8());
        let base = input.u16();
        if how & 4 != 0 {
            let mut at = |align: u64| Iova::new(u64::from(input.u16()) / align * align);
            let queue = &mut self.queues[nth];
            (queue.desc, queue.avail, queue.used) = (at(16), at(4), at(4));
        }
        self.queues[nth].size = size.max(1);
        let QueueConfig {
            desc, avail, used, ..
        } = self.queues[nth];
        self.ask(Request::SetVringNum(VringState {
            index,
            num: size.into(),
        }));
        self.ask(Request::SetVringBase(VringState {
            index,
            num: base.into(),
        }));
        let start = if self.translations.is_some() { 0 } else { USER };
        self.ask(Request::SetVringAddr(VringAddr {
            index,
            desc: start + desc.raw(),
            avail: start + avail.raw(),
            used: start + used.raw(),
        }));
        let vring = |fd| VringFd {
            index: index as u8,
            fd,
        };
        self.ask(Request::SetVringCall(vring(Some(again(&self.call)))));
        let kick = match how >> 4 {
            14 => None,
            15 => Some(self.file(0)),
            _ => Some(again(&self.kicks[nth])),
        };
        self.ask(Request::SetVringKick(vring(kick)));
        if how & 8 == 0 {
            self.ask(Request::SetVringEnable {
                index,
                enable: true,
            });
        }
    }

    /// Plays the guest: stores, requests, kicks; and, as only its VMM can, cuts its memory off.
    pub(super) fn guest(&mut self, input: &mut Input<'_>) {
        match input.u8() % 8 {
            0 => {
                let (at, len) = (input.u16(), input.u8());
                let bytes = input.bytes(len.into()).to_vec();
                self.store(at.into(), &bytes);
            }
            1..=4 => {
                let queue = self.queues[usize::from(input.u8() & 1)];
                let is_packed = self.is_packed;
                offer(input, &queue, is_packed, self);
            }
            5 | 6 => {
                let which = usize::from(input.u8() & 1);
                let _ = rustix::io::write(&self.kicks[which], &1_u64.to_ne_bytes());
            }
            _ => {
                let what = input.u8();
                let len = u64::from(what >> 4) * 0x400;
                if what & 3 == 0 {
                    let _ = ftruncate(&self.files[usize::from(what >> 2 & 1)], len);
                }
            }
        }
    }
}

/// The first file: guest addresses from 0. Stores do not make it longer.
impl Memory for FrontEnd {
    fn store(&mut self, at: u64, bytes: &[u8]) {
        let file = File::from(again(&self.files[0]));
        let room = file.metadata().map_or(0, |data| data.len());
        let room = room.saturating_sub(at).min(bytes.len() as u64) as usize;
        let _ = file.write_at(&bytes[..room], at);
    }

    fn load(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        let _ = File::from(again(&self.files[0])).read_at(&mut bytes, at);
        u16::from_le_bytes(bytes)
    }
}
