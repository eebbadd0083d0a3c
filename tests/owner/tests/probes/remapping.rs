//! A unit that remaps interrupts by a table which may be absent: messages and lines wait for it,
//! are refused without it, and lines follow when it changes.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use guest_mem::{Access, DmaFault, Iommu, NoIommu, PhysMem, SourceId, Stop, Ticket};
use machine::{
    Absent, DataPath, FunctionContext, FunctionLines, Invalidation, Progress, RemappingUnit,
    Request, Scope, Target, UnitControl, UnitPoll, UnitSink, functions, units,
};
use platform::interrupt::Message;

use crate::{ByHand, Plain, plain};

/// Number that the table adds to a message's data; `None`: the table is absent.
type Table = Arc<Mutex<Option<u32>>>;

/// Number in a table that could not be brought in.
const LOST: u32 = u32::MAX;

/// Ticket of an access while the table is absent.
const TABLE: Ticket = Ticket(7);

/// Nothing but a table of interrupts.
struct Remapper {
    none: NoIommu,
    table: Table,
    has_changed: Arc<Mutex<bool>>,
}

impl UnitControl for Remapper {
    fn has_work(&mut self) -> bool {
        false
    }
}

impl RemappingUnit<()> for Remapper {
    type Iommu = NoIommu;

    fn iommu(&mut self) -> &mut NoIommu {
        &mut self.none
    }

    fn poll<M: PhysMem>(&mut self, _: &M, _: u64, sink: &mut impl UnitSink) -> UnitPoll {
        if std::mem::take(&mut *self.has_changed.lock().unwrap()) {
            let scope = Scope::Interrupts;
            assert_eq!(sink.invalidated(&Invalidation { scope }), 0);
        }
        UnitPoll::default()
    }

    fn remap<M: PhysMem>(&mut self, _: &M, _: SourceId, message: Message) -> Access<Message> {
        let added = self.table.lock().unwrap().ok_or(Stop::Pending(TABLE))?;
        if added == LOST {
            return Err(DmaFault::BadRange.into());
        }
        let data = message.data + added;
        Ok(Message { data, ..message })
    }
}

/// Raises `MESSAGE` when it is written to, and has it on its one line.
#[derive(Default)]
struct Pulse {
    raises: u64,
    is_routed: bool,
    line: Arc<Mutex<Option<Message>>>,
}

const MESSAGE: Message = Message {
    address: 0xfee0_0000,
    data: 0x30,
};

plain!(Pulse, (), 1);

impl Plain for Pulse {
    fn write(&mut self, value: u64) {
        self.raises = value;
    }

    fn connected(&mut self, message: Option<Message>) {
        *self.line.lock().unwrap() = message;
    }
}

impl DataPath<()> for Pulse {
    fn poll<I: Iommu, M: PhysMem>(&mut self, cx: &mut FunctionContext<'_, I, M, ()>) -> Progress {
        for _ in 0..std::mem::take(&mut self.raises) {
            cx.effects.messages.push(MESSAGE);
        }
        if !std::mem::replace(&mut self.is_routed, true) {
            cx.effects.route(0, Some(MESSAGE));
        }
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(&mut self, _: &mut FunctionContext<'_, I, M, ()>) -> bool {
        false
    }
}

units! {
    enum Units: () {
        Remapper(Remapper),
    }
}

functions! {
    enum Functions: () {
        Pulse(Pulse),
    }
}

fn remapped(added: u32) -> Message {
    let data = MESSAGE.data + added;
    Message { data, ..MESSAGE }
}

#[test]
fn messages_and_lines_wait_for_their_table_and_lines_follow_its_changes() {
    let mut machine = ByHand::<Units, Functions>::new();
    let (table, has_changed) = (Table::default(), Arc::<Mutex<bool>>::default());
    let unit = machine.owner.add_unit(Units::Remapper(Remapper {
        none: NoIommu::new(1),
        table: table.clone(),
        has_changed: has_changed.clone(),
    }));
    let pulse = Pulse::default();
    let line = pulse.line.clone();
    let pulse = Functions::Pulse(pulse);
    let function = Target::Function(machine.owner.add(unit, pulse, FunctionLines::default()));
    let source = SourceId::new(0, 1, 0);

    // Two equal messages that wait are one.
    machine.write(function, 0, 0, 2);
    machine.poll();
    assert!(machine.sent.take().is_empty());
    assert_eq!(*line.lock().unwrap(), None, "signals are kept");
    *table.lock().unwrap() = Some(1);
    machine.message(Request::TicketDone(Ticket(8), Ok(())));
    assert!(machine.sent.take().is_empty(), "another's ticket");
    machine.message(Request::TicketDone(TABLE, Ok(())));
    assert_eq!(machine.sent.take(), [(source, remapped(1))]);
    assert_eq!(*line.lock().unwrap(), Some(remapped(1)));

    *table.lock().unwrap() = Some(2);
    *has_changed.lock().unwrap() = true;
    machine.poll();
    assert_eq!(*line.lock().unwrap(), Some(remapped(2)));

    *table.lock().unwrap() = None;
    machine.write(function, 0, 0, 1);
    machine.poll();
    *table.lock().unwrap() = Some(LOST);
    machine.message(Request::TicketDone(TABLE, Err(Absent)));
    *table.lock().unwrap() = Some(3);
    machine.message(Request::TicketDone(TABLE, Ok(())));
    assert!(machine.sent.take().is_empty(), "its table never came");
    assert_eq!(machine.owner.totals().blocked_interrupts, 1);

    // Messages that wait when their function is removed are dropped, and none of them reaches the
    // function that takes its place.
    *table.lock().unwrap() = None;
    machine.write(function, 0, 0, 1);
    machine.poll();
    let Target::Function(number) = function else {
        panic!("it is one");
    };
    let (told, removed) = channel();
    machine.owner.remove(number, told);
    machine.poll();
    assert_eq!(removed.try_recv(), Ok(source));
    *table.lock().unwrap() = Some(4);
    machine.message(Request::TicketDone(TABLE, Ok(())));
    assert!(machine.sent.take().is_empty(), "its function is gone");
}
