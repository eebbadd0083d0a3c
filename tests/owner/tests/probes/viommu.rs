//! A paravirtual IOMMU in outline: a function whose requests, taken from a queue of its own past
//! its unit, change that unit's mappings, and are answered when nothing uses what they took away.

use std::collections::BTreeMap;

use guest_mem::{
    Access, Dma, DmaFault, Gpa, Iommu, Iova, LeaseTable, Leases, PAGE_SIZE, Perm, PhysMem, Run,
    SourceId, View,
};
use machine::{
    Command, CommandId, CommandResult, DataPath, FunctionContext, FunctionLines, Progress,
    RemappingUnit, Target, UnitControl, UnitPoll, UnitSink, functions, units,
};

use crate::{ByHand, Plain, plain};

/// Request to the unit: a page to map, or to unmap.
enum Change {
    Map { iova: u64, gpa: u64 },
    Unmap { iova: u64 },
}

/// Pages, and commands that wait for leases.
struct PageMap {
    pages: BTreeMap<u64, u64>,
    leases: LeaseTable,
    draining: Vec<CommandId>,
    generation: u64,
}

impl Iommu for PageMap {
    fn translate<M: PhysMem>(&mut self, _: &M, _: SourceId, iova: Iova, _: Perm) -> Access<Run> {
        let offset = iova.raw() % PAGE_SIZE;
        let page = self.pages.get(&(iova.raw() - offset));
        let gpa = page.ok_or(DmaFault::Blocked { iova })?;
        let (gpa, len) = (Gpa::new(gpa + offset), PAGE_SIZE - offset);
        Ok(Run { gpa, len })
    }

    fn generation(&self, _: SourceId) -> u64 {
        self.generation
    }

    type Leases = LeaseTable;

    fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }
}

impl UnitControl for PageMap {
    fn has_work(&mut self) -> bool {
        !self.draining.is_empty()
    }
}

impl RemappingUnit<Change> for PageMap {
    type Iommu = Self;

    fn iommu(&mut self) -> &mut Self {
        self
    }

    fn poll<M: PhysMem>(&mut self, _: &M, _: u64, sink: &mut impl UnitSink) -> UnitPoll {
        if self.leases.stale() == 0 {
            let done = self.draining.drain(..);
            done.for_each(|id| sink.command_done(id, CommandResult::Done));
        }
        UnitPoll::default()
    }

    fn command<M: PhysMem>(
        &mut self,
        command: Command<Change>,
        _: &M,
        _: u64,
        sink: &mut impl UnitSink,
    ) {
        match command.what {
            Change::Map { iova, gpa } => {
                self.pages.insert(iova, gpa);
                sink.command_done(command.id, CommandResult::Done);
            }
            Change::Unmap { iova } => {
                self.pages.remove(&iova);
                self.generation += 1;
                let page = (Iova::new(iova), Iova::new(iova + PAGE_SIZE - 1));
                self.leases.recheck_now(Some(page), |_| false);
                self.draining.push(command.id);
            }
        }
    }
}

/// Address of the queue's first entry: four words, kind (1 map, 2 unmap), IOVA, GPA, answer.
const QUEUE: u64 = 0x8000;

units! {
    enum Units: Change {
        Map(PageMap),
    }
}
functions! {
    enum Functions: Change {
        Viommu(Viommu),
    }
}

/// The IOMMU's function. A write to its one register says how many entries its queue has by now.
#[derive(Default)]
struct Viommu {
    available: u64,
    taken: u64,
    asked: BTreeMap<CommandId, u64>,
    answers: Vec<u64>,
}

plain!(Viommu, Change, 1);
impl Plain for Viommu {
    fn write(&mut self, value: u64) {
        self.available = value;
    }

    fn answer(&mut self, id: CommandId, result: CommandResult) {
        assert_eq!(result, CommandResult::Done);
        self.answers.extend(self.asked.remove(&id));
    }
}

impl DataPath<Change> for Viommu {
    fn poll<I: Iommu, M: PhysMem>(
        &mut self,
        cx: &mut FunctionContext<'_, I, M, Change>,
    ) -> Progress {
        let (mut dma, effects) = cx.split_bypass();
        for entry in self.answers.drain(..) {
            dma.write(Iova::new(entry + 24), &[1]).unwrap();
        }
        while self.taken < self.available {
            let entry = QUEUE + 32 * self.taken;
            let mut words = [[0; 8]; 3];
            dma.read(Iova::new(entry), words.as_flattened_mut())
                .unwrap();
            let [what, iova, gpa] = words.map(u64::from_le_bytes);
            let change = match what {
                1 => Change::Map { iova, gpa },
                _ => Change::Unmap { iova },
            };
            self.asked.insert(effects.command(change), entry);
            self.taken += 1;
        }
        Progress::Idle
    }

    fn has_work<I: Iommu, M: PhysMem>(
        &mut self,
        _: &mut FunctionContext<'_, I, M, Change>,
    ) -> bool {
        self.taken < self.available
    }
}

#[test]
fn an_unmap_is_answered_when_nothing_uses_the_page() {
    let mut machine = ByHand::<Units, Functions>::new();
    let unit = machine.owner.add_unit(Units::Map(PageMap {
        pages: BTreeMap::new(),
        leases: LeaseTable::new(16),
        draining: Vec::new(),
        generation: 0,
    }));
    let viommu = Functions::Viommu(Viommu::default());
    let viommu = Target::Function(machine.owner.add(unit, viommu, FunctionLines::default()));
    let device = SourceId::new(0, 2, 0);
    let iova = Iova::new(0xf_0000);
    let ram = machine.ram.clone();
    let lease =
        |Units::Map(map): &mut Units| View::new(map, &ram, device).lease(iova, 8, Perm::Write);
    assert!(lease(machine.owner.unit(unit).unwrap()).is_err());
    machine.put(QUEUE, &[1, iova.raw(), 0x5000]);
    machine.write(viommu, 0, 0, 1);
    machine.poll();
    assert_eq!(machine.get(QUEUE + 24), 1, "mapped, within one sweep");
    let held = lease(machine.owner.unit(unit).unwrap()).unwrap();
    machine.put(QUEUE + 32, &[2, iova.raw(), 0]);
    machine.write(viommu, 0, 0, 2);
    (0..10).for_each(|_| machine.poll());
    assert_eq!(machine.get(QUEUE + 56), 0, "a device holds the page");
    let Units::Map(map) = machine.owner.unit(unit).unwrap();
    map.leases_mut().end(held.id);
    (0..3).for_each(|_| machine.poll());
    assert_eq!(machine.get(QUEUE + 56), 1, "and has let go of it");
}
