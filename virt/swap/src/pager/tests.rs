use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

use guest_mem::{GuestRam, HugePages};
use uffd::Source;
use vio::blk::MemDisk;

use super::*;

/// Machine that checks, when the pager reports its failure, whether a descriptor is still open.
struct DescriptorProbe {
    descriptor: Arc<Mutex<PathBuf>>,
    heard: mpsc::Sender<io::Result<PathBuf>>,
}

impl Machine for DescriptorProbe {
    fn evict(&self, _: Pages) {}
    fn ticket_done(&self, _: guest_mem::Ticket) {}
    fn wake(&self) {}
    fn stop_vcpus(&self) {}
    fn pause(&self, _: PauseReason, _: &Report) {}
    fn resume(&self, _: &Report) {}

    fn fail(&self, _: &io::Error) {
        let path = self.descriptor.lock().expect("it is not held long");
        self.heard
            .send(fs::read_link(&*path))
            .expect("somebody hears");
    }
}

/// Closing it would wake the accesses that wait for a page, which would find zeroes: a vCPU might
/// write them to a disk before it is stopped.
#[test]
fn a_pager_that_fails_keeps_its_descriptor_until_the_machine_has_ended() {
    let ram = GuestRam::with_pages(&[(Gpa::new(0), 2 << 20)], HugePages::Never);
    let ram = ram.expect("memory");
    let slot = ram.slot_mapping(&ram.regions()[0]).expect("a mapping");
    let (heard, hears) = mpsc::channel();
    let descriptor = Arc::default();
    let store = MemDisk::new(vec![0; PAGE_SIZE as usize], 1, false);
    let parts = Parts {
        ram: SwappedRam::new(ram),
        slots: vec![Arc::new(slot)],
        faults: Source::User,
        limit: 512,
        store: (Box::new(store), 1),
        preventer: None,
        images: Vec::new(),
    };
    let machine = DescriptorProbe {
        descriptor: Arc::clone(&descriptor),
        heard,
    };
    let mut pager = match Pager::new(parts, Box::new(machine)) {
        Ok(pager) => pager,
        Err(error) => return eprintln!("skipped: {error}"),
    };
    let frames = pager.frames.as_ref().expect("it has not failed yet");
    let number = frames.guest().as_fd().as_raw_fd();
    *descriptor.lock().expect("nobody has it") = format!("/proc/self/fd/{number}").into();
    pager.end_of(&io::Error::other("refused"));
    let was = hears.recv().expect("it is told").expect("it is open");
    assert_eq!(was, PathBuf::from("anon_inode:[userfaultfd]"));
    // Only the first failure is reported.
    pager.end_of(&io::Error::other("refused again"));
    assert!(hears.try_recv().is_err());
    pager.let_go();
    assert!(pager.frames.is_none() && pager.failed.is_none());
}
