//! Doorbells that move, before a KVM that only records its calls.

use super::*;

/// Recorder of KVM's calls: whether to listen, and where.
#[derive(Default)]
struct Noted {
    calls: Mutex<Vec<(bool, u64)>>,
    refuses: Option<u64>,
}

impl Noted {
    fn note(&self, is_listening: bool, at: IoEventAddress) -> io::Result<()> {
        let IoEventAddress::Mmio(at) = at else {
            panic!("doorbells are in memory");
        };
        self.calls.lock().unwrap().push((is_listening, at));
        match self.refuses {
            Some(refused) if refused == at => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    fn take(&self) -> Vec<(bool, u64)> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl Listen for Noted {
    fn listen(&self, _fd: &EventFd, at: IoEventAddress) -> io::Result<()> {
        self.note(true, at)
    }

    fn forget(&self, _fd: &EventFd, at: IoEventAddress) -> io::Result<()> {
        self.note(false, at)
    }
}

#[test]
fn an_old_place_is_left_before_the_new_one_is_listened_at() {
    let kvm = Arc::new(Noted::default());
    let events = IoEvents::new(kvm.clone(), 2, 4, None).unwrap();
    events.place(None);
    assert_eq!(kvm.take(), [], "nowhere before and after");
    events.place(Some(0x1000));
    assert_eq!(kvm.take(), [(true, 0x1000), (true, 0x1004)]);
    events.place(Some(0x1000));
    assert_eq!(kvm.take(), [], "each change is a grace period");
    // They overlap by one: KVM has one doorbell at an address.
    events.place(Some(0x1004));
    assert_eq!(
        kvm.take(),
        [
            (false, 0x1000),
            (false, 0x1004),
            (true, 0x1004),
            (true, 0x1008)
        ]
    );
    events.place(None);
    assert_eq!(kvm.take(), [(false, 0x1004), (false, 0x1008)]);
}

#[test]
fn a_doorbell_that_kvm_refuses_does_not_keep_the_others_from_their_places() {
    let kvm = Arc::new(Noted {
        refuses: Some(0x1000),
        ..Noted::default()
    });
    let events = IoEvents::new(kvm.clone(), 2, 4, None).unwrap();
    events.place(Some(0x1000));
    assert_eq!(kvm.take(), [(true, 0x1000), (true, 0x1004)]);
    events.place(None);
    assert_eq!(kvm.take(), [(false, 0x1000), (false, 0x1004)]);
}
