//! Pieces that follow their BARs: before slots that only note what they are asked, and before KVM
//! with a guest of four instructions.

use std::os::fd::AsFd;

use guest_mem::HugePages;
use kvm_bindings::kvm_regs;

use super::*;
use crate::testing::{Exit, Guest};

const PAGE: u64 = 4096;

/// Shared memory that begins with `word`.
fn device_memory(pages: u64, word: u32) -> Arc<SlotMapping> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(pages * PAGE).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &word.to_le_bytes(), 0).unwrap();
    let mapping = SlotMapping::new(file.as_fd(), 0, pages * PAGE, HugePages::Never);
    Arc::new(mapping.unwrap())
}

fn piece(bar: u8, offset: u64, pages: u64) -> BarPiece {
    BarPiece {
        bar,
        offset,
        mapping: device_memory(pages, 0),
    }
}

/// Slots as KVM keeps them: none overlaps another, and a refusal changes nothing.
#[derive(Default)]
struct Noted {
    state: Mutex<NotedState>,
}

#[derive(Default)]
struct NotedState {
    /// Start and length by number.
    slots: Vec<Option<(u64, u64)>>,
    /// Calls, in order: whether to show, and where.
    calls: Vec<(bool, u64)>,
    /// Removals to be refused.
    refusals: u32,
}

impl Noted {
    fn take(&self) -> Vec<(bool, u64)> {
        std::mem::take(&mut self.state.lock().unwrap().calls)
    }

    fn shown(&self) -> Vec<u64> {
        let state = self.state.lock().unwrap();
        let mut shown: Vec<u64> = state.slots.iter().flatten().map(|slot| slot.0).collect();
        shown.sort_unstable();
        shown
    }
}

fn errno(code: i32) -> KvmError {
    KvmError::Refused {
        what: "a memory slot",
        source: kvm_ioctls::Error::new(code),
    }
}

impl Slots for Noted {
    fn show(&self, at: Gpa, mapping: &Arc<SlotMapping>) -> Result<SlotId, KvmError> {
        let mut state = self.state.lock().unwrap();
        let (start, len) = (at.raw(), mapping.len());
        let overlaps = |slot: &(u64, u64)| slot.0 < start + len && start < slot.0 + slot.1;
        if state.slots.iter().flatten().any(overlaps) {
            return Err(errno(libc::EEXIST));
        }
        if !start.is_multiple_of(PAGE) {
            return Err(errno(libc::EINVAL));
        }
        state.calls.push((true, start));
        state.slots.push(Some((start, len)));
        Ok(SlotId::of_test(state.slots.len() - 1))
    }

    fn hide(&self, slot: SlotId) -> Result<(), StillMapped> {
        let mut state = self.state.lock().unwrap();
        if state.refusals > 0 {
            state.refusals -= 1;
            let source = errno(libc::ENOMEM);
            return Err(StillMapped { slot, source });
        }
        let (start, _) = state.slots[slot.number()]
            .take()
            .expect("a slot that is there");
        state.calls.push((false, start));
        Ok(())
    }
}

/// Start of the window below 4 GiB.
const LOW: u64 = layout::PCI_WINDOW;

#[test]
fn a_piece_is_gone_from_the_old_place_before_it_is_at_the_new_one() {
    let slots = Arc::new(Noted::default());
    // A BAR of four pages with the MSI-X table in the second, and another BAR.
    let pieces = vec![piece(0, 0, 1), piece(0, 2 * PAGE, 2), piece(2, 0, 1)];
    let bars = BarMemory::over(slots.clone(), pieces);
    bars.place(0, None);
    assert_eq!(slots.take(), [], "nowhere before and after");
    bars.place(0, Some(LOW));
    assert_eq!(slots.take(), [(true, LOW), (true, LOW + 2 * PAGE)]);
    bars.place(0, Some(LOW));
    assert_eq!(slots.take(), [], "each change is a grace period");
    // The first piece goes where the second has been, which is removed before that.
    let moved = LOW + 2 * PAGE;
    bars.place(0, Some(moved));
    assert_eq!(
        slots.take(),
        [
            (false, LOW),
            (false, LOW + 2 * PAGE),
            (true, moved),
            (true, moved + 2 * PAGE)
        ]
    );
    bars.place(2, Some(LOW));
    bars.place(0, None);
    assert_eq!(
        slots.shown(),
        [LOW],
        "decoding of one BAR says nothing of another"
    );
    drop(bars);
    assert!(
        slots.shown().is_empty(),
        "a function that is gone has no memory"
    );
}

#[test]
fn a_place_that_is_refused_leaves_that_piece_as_exits_and_the_others_shown() {
    let high = layout::PCI_WINDOW_HIGH;
    for (place, shown) in [
        // Below the window is RAM, beyond it ECAM, chips, registers, local APICs.
        (LOW - PAGE, vec![LOW + PAGE]),
        (
            layout::PCI_WINDOW_END - 2 * PAGE,
            vec![layout::PCI_WINDOW_END - 2 * PAGE],
        ),
        (layout::PCI_WINDOW_END, vec![]),
        (layout::VTD, vec![]),
        (0, vec![]),
        (high.end - 2 * PAGE, vec![high.end - 2 * PAGE]),
        (u64::MAX - PAGE + 1, vec![]),
        (u64::MAX - 2 * PAGE + 1, vec![]),
        // No multiple of 4 KiB: KVM says no.
        (LOW + 16, vec![]),
        // Another function is there.
        (LOW + 8 * PAGE, vec![LOW + 10 * PAGE]),
    ] {
        let slots = Arc::new(Noted::default());
        let other = slots
            .show(Gpa::new(LOW + 8 * PAGE), &device_memory(1, 0))
            .unwrap();
        let bars = BarMemory::over(slots.clone(), vec![piece(0, 0, 1), piece(0, 2 * PAGE, 1)]);
        bars.place(0, Some(place));
        slots.hide(other).unwrap();
        assert_eq!(slots.shown(), shown, "BAR at {place:#x}");
        // The place is free by now: the next change of any BAR shows what was refused for that.
        bars.place(0, Some(LOW + 32 * PAGE));
        assert_eq!(slots.shown(), [LOW + 32 * PAGE, LOW + 34 * PAGE]);
        bars.place(0, None);
        assert!(slots.shown().is_empty());
    }
}

#[test]
fn bars_that_pass_through_each_others_places_end_up_shown() {
    let slots = Arc::new(Noted::default());
    let bars = BarMemory::over(slots.clone(), vec![piece(0, 0, 1), piece(1, 0, 1)]);
    bars.place(0, Some(LOW));
    bars.place(1, Some(LOW + PAGE));
    // For a moment both are at one place.
    bars.place(0, Some(LOW + PAGE));
    assert_eq!(slots.shown(), [LOW + PAGE]);
    bars.place(1, Some(LOW));
    assert_eq!(slots.shown(), [LOW, LOW + PAGE]);
}

#[test]
fn a_slot_that_kvm_does_not_remove_is_remembered_and_removed_later() {
    let slots = Arc::new(Noted::default());
    let bars = BarMemory::over(slots.clone(), vec![piece(0, 0, 1)]);
    bars.place(0, Some(LOW));
    slots.state.lock().unwrap().refusals = 2;
    bars.place(0, Some(LOW + PAGE));
    assert_eq!(slots.shown(), [LOW], "not at two places");
    // Back again: it is there.
    bars.place(0, Some(LOW));
    assert_eq!(slots.shown(), [LOW]);
    bars.place(0, None);
    assert_eq!(slots.shown(), [LOW]);
    bars.place(0, Some(LOW + PAGE));
    assert_eq!(slots.shown(), [LOW + PAGE]);
}

/// A mapping keeps the device open: after the end no piece holds one, but one that KVM still has.
#[test]
fn ended_bars_are_not_shown_again_and_release_the_device() {
    let slots = Arc::new(Noted::default());
    let pieces = vec![piece(0, 0, 1), piece(0, 2 * PAGE, 1), piece(2, 0, 1)];
    let mappings: Vec<_> = pieces
        .iter()
        .map(|piece| Arc::downgrade(&piece.mapping))
        .collect();
    let bars = BarMemory::over(slots.clone(), pieces);
    bars.place(0, Some(LOW));
    slots.state.lock().unwrap().refusals = 1;
    bars.end();
    assert_eq!(slots.shown(), [LOW], "KVM refused to remove the first");
    let open = || mappings.iter().map(|mapping| mapping.strong_count() > 0);
    assert_eq!(open().collect::<Vec<_>>(), [true, false, false]);
    for bar in [2, 0] {
        bars.place(bar, Some(LOW + 8 * PAGE));
        assert_eq!(slots.shown(), [0; 0], "removed at the next occasion");
    }
    assert!(!open().any(|is_open| is_open));
    bars.place(0, Some(LOW));
    assert_eq!(slots.shown(), [0; 0]);
}

/// The words that the guest reads and writes, and how: by exits or not.
#[derive(Debug, PartialEq, Eq)]
struct Round {
    read: u32,
    has_exited: bool,
}

/// A guest that reads a word at an address, writes the one behind it, and stores what it has read
/// where that is an exit.
struct Reader(Guest);

impl Reader {
    /// mov eax, [rsi]; mov [rsi + 4], ecx; mov [r8], eax; jmp to the start.
    const CODE: [u8; 10] = [0x8b, 0x06, 0x89, 0x4e, 0x04, 0x41, 0x89, 0x00, 0xeb, 0xf6];
    const DONE: u64 = LOW + (1 << 20);
    /// The answer to a read that exits.
    const EXITED: u32 = 0xeeee_eeee;

    /// `None` where there is no KVM.
    fn new() -> Option<Self> {
        let large_pages = [LOW, LOW + (2 << 20), layout::PCI_WINDOW_HIGH.start];
        Guest::new(&Self::CODE, &large_pages).map(Self)
    }

    fn vm(&self) -> &Arc<Vm> {
        &self.0.vm
    }

    /// Lets the guest read at `at` and write `write` behind it.
    fn round(&mut self, at: u64, write: u32) -> Round {
        self.0.start(kvm_regs {
            rsi: at,
            rcx: write.into(),
            r8: Self::DONE,
            ..Default::default()
        });
        let mut exits = 0;
        loop {
            match self.0.run(Self::EXITED) {
                Exit::Read(address) => assert_eq!(address, at),
                Exit::Write(Self::DONE, read) => {
                    assert!(exits == 0 || exits == 2, "both accesses, or none");
                    let (read, has_exited) = (read as u32, exits == 2);
                    return Round { read, has_exited };
                }
                Exit::Write(address, _) => assert_eq!(address, at + 4),
            }
            exits += 1;
        }
    }
}

fn second_word(mapping: &SlotMapping) -> u32 {
    let at = std::ptr::with_exposed_provenance::<u32>((mapping.hva().raw() + 4) as usize);
    // SAFETY: an aligned word of the mapping, which is shared memory that nothing refers to; the
    // vCPU that writes it runs on this thread.
    unsafe { at.read_volatile() }
}

#[test]
fn a_guest_reaches_a_bars_memory_where_the_bar_is_and_nowhere_else() {
    const SHOWN: u32 = 0x600d_600d;
    let Some(mut guest) = Reader::new() else {
        return;
    };
    let exit = Round {
        read: Reader::EXITED,
        has_exited: true,
    };
    let shown = Round {
        read: SHOWN,
        has_exited: false,
    };
    let mapping = device_memory(1, SHOWN);
    let pieces = vec![BarPiece {
        bar: 0,
        offset: PAGE,
        mapping: mapping.clone(),
    }];
    let bars = BarMemory::new(guest.vm().clone(), pieces);
    let places = [LOW, LOW + (2 << 20), layout::PCI_WINDOW_HIGH.start];
    assert_eq!(guest.round(LOW + PAGE, 1), exit, "before it is placed");
    for (round, place) in places.iter().cycle().take(300).enumerate() {
        bars.place(0, Some(*place));
        let write = 0x1000 + round as u32;
        assert_eq!(guest.round(place + PAGE, write), shown);
        assert_eq!(second_word(&mapping), write, "the device's own memory");
        // The page before it, which has been left out, and all other places.
        assert_eq!(guest.round(*place, 0), exit);
        for other in places.iter().filter(|other| *other != place) {
            assert_eq!(guest.round(other + PAGE, 0), exit);
        }
        assert_eq!(second_word(&mapping), write);
    }
    bars.place(0, None);
    for place in places {
        assert_eq!(guest.round(place + PAGE, 0), exit, "decoding is off");
    }
    bars.place(0, Some(LOW));
    assert_eq!(guest.round(LOW + PAGE, 2), shown);
    drop(bars);
    assert_eq!(guest.round(LOW + PAGE, 3), exit, "the function is gone");
    assert_eq!(Arc::strong_count(&mapping), 1, "no slot keeps it");
}

#[test]
fn kvm_refuses_a_piece_over_another_slot_and_both_stay_what_they_were() {
    let Some(mut guest) = Reader::new() else {
        return;
    };
    let (first, second) = (device_memory(2, 1), device_memory(2, 2));
    let bars = |mapping: &Arc<SlotMapping>| {
        let piece = BarPiece {
            bar: 0,
            offset: 0,
            mapping: mapping.clone(),
        };
        BarMemory::new(guest.vm().clone(), vec![piece])
    };
    let (one, other) = (bars(&first), bars(&second));
    one.place(0, Some(LOW));
    for overlapping in [LOW, LOW + PAGE, LOW - PAGE] {
        other.place(0, Some(overlapping));
        assert_eq!(Arc::strong_count(&second), 2, "refused at {overlapping:#x}");
        assert_eq!(guest.round(LOW, 0).read, 1);
    }
    other.place(0, Some(LOW + 2 * PAGE));
    assert_eq!(guest.round(LOW + 2 * PAGE, 0).read, 2);
    one.place(0, None);
    other.place(0, Some(LOW + PAGE));
    assert_eq!(guest.round(LOW + PAGE, 0).read, 2);
    assert!(guest.round(LOW, 0).has_exited);
}

#[test]
fn ram_is_not_hidden_by_a_slot_that_comes_and_goes() {
    let Some(guest) = Reader::new() else {
        return;
    };
    let mapping = device_memory(1, 7);
    let refused = guest.vm().map(Gpa::new(0x1_0000), &mapping, 0);
    assert!(refused.is_err(), "RAM is there");
    let refused = guest.vm().map(Gpa::new(LOW + 1), &mapping, 0);
    assert!(refused.is_err(), "no page begins there");
    assert_eq!(Arc::strong_count(&mapping), 1);
    let slot = guest.vm().map(Gpa::new(LOW), &mapping, 0).unwrap();
    let number = slot.number();
    guest.vm().unmap(slot).unwrap();
    let again = guest.vm().map(Gpa::new(LOW), &mapping, 0).unwrap();
    assert_eq!(again.number(), number, "numbers are used again");
    guest.vm().unmap(again).unwrap();
    assert_eq!(Arc::strong_count(&mapping), 1);
}
