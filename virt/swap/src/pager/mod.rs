//! The pager: the poller that carries the [`Residency`]'s commands out.
//!
//! It receives the events of all sides: faults of processors from userfaultfd, requests of devices
//! and disks as messages of the owner, ends of its own reads and writes from the rings. Each is
//! reported to the book, and the book's commands are carried out before the next event is reported.
//! Reads and writes of the store and the images are started, and reported when they have ended.
//!
//! It has a sidecore of its own. Its system calls may take long (an unmapping interrupts every core
//! that runs the guest), and no other poller should wait for them. It never waits for the owner,
//! which may itself wait in the kernel for a processor that waits for a page. When idle it sleeps.
//!
//! When an operation fails (the store is full, or does not answer, or returns other content) the
//! machine is paused with the reason. It is resumed once the failed operation has been done: it is
//! retried each second, and when the limit or the store has changed.

mod faults;
mod holds;
mod machine;
mod watermark;

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use guest_mem::{Gpa, PAGE_SIZE, Pages, PhysMem};
use sidecore::{Activity, AlwaysPoll, ArmError, Handle, Nanos, PollContext, Poller, Wakes};
use uffd::{GuestMapping, Stores};

use crate::batch::Batch;
use crate::frames::{Buffer, Content, Frames, crc};
pub use crate::link::Message;
use crate::link::{Gate, Kind, OwnerEvent, OwnerMessage};
use crate::page_io::{PageIo, PageOp};
use crate::preventer::{Found, Preventer};
use crate::ram::SwappedRam;
pub use crate::report::Report;
use crate::residency::{
    BATCH, Command, CommandOutcome, Errno, IoPolicy, Page, PauseReason, Protection, Residency,
    Ticket,
};
use holds::Holds;
pub use machine::{Machine, Parts};
use watermark::Watermark;

/// Bytes that may be in memory beyond the limit.
pub const BATCH_BYTES: u64 = BATCH as u64 * PAGE_SIZE;

/// Time between two questions to the owner, if all pages of the last one are in use.
const PACE: Duration = Duration::from_millis(1);
/// Time between two tries of a failed operation.
const RETRY: Duration = Duration::from_secs(1);
/// Time between two searches for slots to trim, a few MiB each.
const TRIM_PACE: Duration = Duration::from_millis(20);

/// The pager. See the module's head.
pub struct Pager {
    residency: Residency,
    /// `None` once the machine has ended and its guest's faults are not served any more, or the
    /// pager has failed.
    frames: Option<Frames>,
    /// Frames of a pager that has failed, until the machine has ended: accesses to absent pages go
    /// on waiting.
    failed: Option<Frames>,
    ram: SwappedRam,
    gates: Vec<Arc<Gate>>,
    page_io: PageIo,
    machine: Box<dyn Machine>,
    holds: Holds,
    batch: Batch,
    buffer: Buffer,
    preventer: Option<Preventer>,
    /// Content for the next page that comes as zeroes.
    content: Option<(Page, Box<Content>)>,
    ask_at: Nanos,
    retry_at: Option<Nanos>,
    trim_at: Nanos,
    is_over: bool,
    /// Notified when nothing is under way.
    end: Option<mpsc::Sender<()>>,
    watermark: Watermark,
    report: Report,
    fds: Vec<(RawFd, u32)>,
    scratch: Vec<RawFd>,
}

impl Pager {
    /// Serves the guest's faults from now on. Its memory may have content already: such pages are
    /// in memory.
    ///
    /// # Errors
    /// The kernel's reason with what to do.
    pub fn new(parts: Parts, machine: Box<dyn Machine>) -> io::Result<Self> {
        let Parts {
            ram,
            slots,
            faults,
            limit,
            store: (store, slot_count),
            preventer,
            images,
        } = parts;
        let offsets = ram.ram().regions().iter().map(|region| region.fd_offset);
        let guest = GuestMapping::new(offsets.zip(slots), faults, Stores::Traced)?;
        let file = ram.ram().memfd().ok_or(io::ErrorKind::Unsupported)?;
        let keep = ram.ram().keep_alive();
        let gates = (0..images.len()).map(|disk| ram.gate(disk as u8)).collect();
        let pages = u32::try_from(ram.pages()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut pager = Self {
            residency: Residency::new(pages, limit, slot_count),
            frames: Some(Frames::new(file.try_clone_to_owned()?, guest)),
            failed: None,
            gates,
            page_io: PageIo::new(store, images, &keep),
            machine,
            holds: Holds::default(),
            batch: Batch::default(),
            buffer: Buffer::default(),
            preventer: preventer.map(|(vcpus, limit)| Preventer::new(vcpus, limit)),
            content: None,
            ask_at: Nanos(0),
            retry_at: None,
            trim_at: Nanos(0),
            is_over: false,
            end: None,
            watermark: Watermark::default(),
            report: Report::default(),
            fds: Vec::new(),
            scratch: Vec::new(),
            ram,
        };
        pager.adopt()?;
        Ok(pager)
    }

    /// Sets another policy that decides which reads and writes are avoided: for measurements.
    pub fn set_policy(&mut self, policy: Box<dyn IoPolicy>) {
        self.residency.set_policy(policy);
    }

    /// Enables trimming: blocks behind free slots of the store are returned to its file system or
    /// device, while the store is idle, a MiB at least at a time, by
    /// [`Discard`](vio::blk::Op::Discard). If that is refused it is not tried again. Blocks
    /// returned to a file system may have another user when the slots are written again.
    pub fn trims_slots(&mut self) {
        self.residency.trims_slots();
    }

    /// Connects the memory with the pager, which a sidecore now runs as `handle` says. Before that
    /// the pager asks the owner for no pages, since it would not receive the answer.
    pub fn connect(ram: &SwappedRam, handle: Handle<Message>) {
        ram.connect(handle.clone());
        // A sidecore that has ended needs no connection.
        let _ = handle.send(Message::Connected);
    }

    /// Records that the pages that have content are in memory.
    fn adopt(&mut self) -> io::Result<()> {
        // As many as the book has.
        let end = self.ram.pages() as u32;
        let mut at = 0;
        while let Some(frames) = &self.frames
            && let Some(run) = frames.next_present(at, end)?
        {
            at = run.end;
            for number in run {
                self.residency.adopt(Page(number));
                self.carry_out()?;
            }
        }
        Ok(())
    }

    /// Carries out the book's commands until there are none.
    fn carry_out(&mut self) -> io::Result<()> {
        loop {
            let commands = self.residency.take_commands();
            if commands.is_empty() {
                self.page_io.start(&self.ram);
                return Ok(());
            }
            let mut commands = commands.into_iter().peekable();
            while let Some(command) = commands.next() {
                if let Command::Show(page) = command {
                    // Devices need no mapping of the guest's, but the page's content.
                    if !self.batch.shows_then(page) {
                        self.ram.show(page);
                    }
                    continue;
                }
                let has_content = |page| self.content.as_ref().is_some_and(|(of, _)| *of == page);
                let is_zeroed = match command {
                    Command::Zero(page) if !has_content(page) => {
                        let map = Command::Map(page, Protection::Writable);
                        commands.next_if_eq(&map).map(|_| page)
                    }
                    _ => None,
                };
                let taken = |batch: &mut Batch| match is_zeroed {
                    Some(page) => batch.takes_zeroes(page),
                    None => batch.takes(&command),
                };
                if taken(&mut self.batch) {
                    continue;
                }
                self.finish_batch()?;
                if !taken(&mut self.batch) {
                    self.command(command)?;
                }
            }
            self.finish_batch()?;
        }
    }

    /// Carries out the batch.
    fn finish_batch(&mut self) -> io::Result<()> {
        match &self.frames {
            Some(frames) => self.batch.finish(frames, &mut self.residency, &self.ram),
            None => {
                self.batch.give_up(&self.ram);
                Ok(())
            }
        }
    }

    fn command(&mut self, command: Command) -> io::Result<()> {
        let Some(frames) = &self.frames else {
            // A waiter that needs only the answer gets it.
            if let Command::Done(ticket) = command {
                self.done(ticket);
            }
            return Ok(());
        };
        match command {
            Command::Unmap(_)
            | Command::Examine(_)
            | Command::Punch(_)
            | Command::Map(..)
            | Command::Show(_) => {
                unreachable!("done with others of its kind")
            }
            Command::Ask(pages) => {
                let gpas: Vec<Gpa> = pages.iter().map(|page| self.ram.gpa_of(*page)).collect();
                let pages = Pages::new(&gpas).expect("a batch of whole pages");
                self.machine.evict(pages);
            }
            Command::Zero(page) => match self.content.take_if(|(of, _)| *of == page) {
                Some((_, content)) => frames.write(page, &content)?,
                None => frames.zero(page)?,
            },
            Command::Fetch(page, backing) => self.page_io.push(PageOp::Fetch(page, backing)),
            Command::Save(page, slot) => self.page_io.push(PageOp::Save(page, slot)),
            Command::Trim(first, count) => self.page_io.push(PageOp::Trim(first, count)),
            Command::Protect(page) => frames.guest().protect(page.0.into())?,
            // Writable: it is unknown whether it was stored to between the last check of its
            // uffd-wp bit and the host's unmapping.
            Command::Wake(page) => frames.map(page, 1, Protection::Writable)?,
            Command::Done(ticket) => self.done(ticket),
            Command::Go(op) => {
                self.gates[usize::from(SwappedRam::disk_of(op))].open(op);
                self.machine.wake();
            }
            Command::Stop(reason) => self.stop(reason),
        }
        Ok(())
    }

    fn done(&mut self, ticket: Ticket) {
        if !self.holds.done(ticket, Nanos::now()) {
            // A discard's.
            self.ram.answer(ticket);
        }
        self.machine.ticket_done(guest_mem::Ticket(ticket.0));
    }

    fn stop(&mut self, reason: PauseReason) {
        self.retry_at = Some(after(Nanos::now(), RETRY));
        if !self.report.is_paused {
            self.report.is_paused = true;
            self.report.pauses += 1;
            self.report.last_pause = Some(reason);
            self.machine.pause(reason, &self.report());
        }
        if self.is_over {
            self.let_go();
        }
    }

    /// Stops serving faults, after the machine's end: no vCPU uses the content that it finds.
    fn let_go(&mut self) {
        self.is_over = true;
        self.failed = None;
        if self.report.is_paused {
            // Closing the descriptor wakes all accesses that wait; absent pages are zeroes from
            // then on.
            self.frames = None;
            self.answer_offers();
        }
    }

    /// Answers a balloon's discards without dropping their pages.
    fn answer_offers(&mut self) {
        for ticket in self.residency.give_up_discards() {
            self.ram.answer(ticket);
            self.machine.ticket_done(guest_mem::Ticket(ticket.0));
        }
    }

    fn event(&mut self, event: OwnerEvent) {
        match event {
            OwnerEvent::Answered { gone, written } => {
                self.ask_at = match gone {
                    0 => after(Nanos::now(), PACE),
                    _ => Nanos(0),
                };
                self.residency.answered(gone, written);
            }
            OwnerEvent::Wanted(ticket, pages) => {
                self.report.tickets += 1;
                let held = pages.iter().map(|(page, _)| *page).collect();
                self.holds.begin(ticket, held, &self.ram);
                self.residency.wanted(ticket, &pages);
            }
            OwnerEvent::Offered(ticket, pages) => {
                self.residency.discard(ticket, &pages);
                if self.frames.is_none() {
                    // The owner will not be asked for them.
                    self.answer_offers();
                }
            }
            OwnerEvent::Began(op, Kind::Read, span) => self.residency.begin_read(op, &span),
            OwnerEvent::Began(op, Kind::Write, span) => self.residency.begin_write(op, &span),
            OwnerEvent::Ended(op, Kind::Read, is_good) => self.residency.end_read(op, is_good),
            OwnerEvent::Ended(op, Kind::Write, is_good) => self.residency.end_write(op, is_good),
            OwnerEvent::Drains(asked) => self.watermark.seen(asked),
        }
    }

    /// Handles the reads and writes that have ended.
    fn take_ended(&mut self) -> io::Result<bool> {
        let ended = self.page_io.poll(&self.ram);
        let any = !ended.is_empty();
        let Some(frames) = &self.frames else {
            return Ok(any);
        };
        for alike in ended.chunk_by(are_read_together) {
            match alike[0] {
                (PageOp::Fetch(first, _), Ok(())) => {
                    let residency = &mut self.residency;
                    // At most as many as the book has pages.
                    frames.read_each(
                        first,
                        alike.len() as u32,
                        &mut self.buffer,
                        |page, content| {
                            residency.ended(CommandOutcome::Fetched(page, Ok(crc(content))));
                        },
                    )?;
                }
                (PageOp::Fetch(page, _), Err(errno)) => {
                    self.residency
                        .ended(CommandOutcome::Fetched(page, Err(errno)));
                }
                (PageOp::Save(page, slot), outcome) => {
                    self.residency
                        .ended(CommandOutcome::Saved(page, slot, outcome));
                }
                (PageOp::Trim(first, count), outcome) => {
                    self.residency
                        .ended(CommandOutcome::Trimmed(first, count, outcome));
                }
            }
        }
        if any {
            self.residency.balance();
            self.carry_out()?;
        }
        Ok(any)
    }

    /// Does the work that is due at `now`.
    fn keep_time(&mut self, now: Nanos) -> io::Result<()> {
        self.holds.look(now, &self.ram);
        if let Some(at) = self.retry_at
            && now >= at
        {
            self.retry();
            self.carry_out()?;
        }
        if let Some(preventer) = &mut self.preventer
            && let Found::Read(pending) = preventer.look(now)
        {
            self.read(pending)?;
        }
        if now >= self.ask_at && self.ram.is_connected() {
            self.residency.ask();
            self.carry_out()?;
        }
        if now >= self.trim_at && self.residency.wants_to_trim() {
            self.trim_at = after(now, TRIM_PACE);
            if !self.page_io.is_busy() {
                self.residency.trim();
                self.carry_out()?;
            }
        }
        self.watermark.look(now, &mut self.residency, &self.ram);
        Ok(())
    }

    fn retry(&mut self) {
        self.retry_at = Some(after(Nanos::now(), RETRY));
        self.residency.retry();
    }

    /// Resumes the guest if the failed operations have been done.
    fn look_whether_to_resume(&mut self) {
        let is_done = !self.residency.is_in_trouble() && !self.page_io.is_busy();
        // Without frames the guest is not resumed.
        if self.report.is_paused && is_done && self.frames.is_some() {
            self.report.is_paused = false;
            self.retry_at = None;
            self.machine.resume(&self.report());
        }
    }

    fn turn(&mut self, now: Nanos) -> io::Result<bool> {
        let mut is_busy = self.serve_faults()?;
        is_busy |= self.take_ended()?;
        self.keep_time(now)?;
        self.look_whether_to_resume();
        if let Some(end) = self.end.take_if(|_| !self.page_io.is_busy()) {
            // The receiver may have stopped waiting.
            let _ = end.send(());
        }
        Ok(is_busy)
    }

    fn told(&mut self, message: Message) -> io::Result<()> {
        match message {
            Message::Owner(OwnerMessage(event)) => self.event(event),
            Message::SetLimit(limit) => {
                self.residency.set_limit(limit);
                self.retry_if_paused();
            }
            Message::AddSlots(count) => {
                self.residency.add_slots(count);
                self.retry_if_paused();
            }
            Message::Report(reply) => reply.send(self.report()),
            Message::Stopped(vcpu) => return self.stopped(vcpu),
            // The next turn asks the owner as it could not before.
            Message::Connected => {}
            Message::LetGo => self.let_go(),
            Message::End(end) => {
                // Without frames, the book's commands are not carried out.
                self.frames = None;
                self.failed = None;
                self.end = Some(end);
            }
        }
        self.carry_out()
    }

    fn retry_if_paused(&mut self) {
        if self.report.is_paused {
            self.retry();
        }
    }

    /// Returns the pager's state.
    pub fn report(&self) -> Report {
        Report {
            limit: self.residency.limit(),
            present: self.residency.present(),
            slots: self.residency.slots(),
            tracked: self.residency.tracked(),
            free_slots: self.residency.free_slots(),
            counts: self.residency.counts(),
            traffic: self.page_io.traffic(),
            ..self.report
        }
    }

    /// Ends the machine, after the kernel has refused an operation. Absent pages stay absent until
    /// its vCPUs have stopped: they would read zeroes.
    fn end_of(&mut self, error: &io::Error) {
        let Some(frames) = self.frames.take() else {
            return;
        };
        if !self.is_over {
            self.failed = Some(frames);
        }
        self.machine.fail(error);
        self.answer_offers();
    }
}

/// Keeps the descriptor open if the pager panics: accesses to absent pages wait until the process
/// ends, and read no zeroes.
impl Drop for Pager {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget((self.frames.take(), self.failed.take()));
        }
    }
}

impl Poller for Pager {
    type Message = Message;
    type Probe = AlwaysPoll;

    fn poll(&mut self, turn: &mut PollContext<'_>) -> Activity {
        self.watermark.rise(&mut self.residency, &self.ram);
        match self.turn(turn.now()) {
            Ok(true) => Activity::Busy,
            Ok(false) if self.page_io.is_busy() => Activity::Waiting,
            Ok(false) => Activity::Idle,
            Err(error) => {
                self.end_of(&error);
                Activity::Idle
            }
        }
    }

    fn message(&mut self, message: Message, _turn: &mut PollContext<'_>) {
        if let Err(error) = self.told(message) {
            self.end_of(&error);
        }
    }

    fn arm(&mut self, wakes: &mut Wakes) -> Result<(), ArmError> {
        self.page_io.arm();
        self.scratch.clear();
        let guest = self.frames.as_ref().map(Frames::guest);
        self.scratch
            .extend(guest.map(|guest| guest.as_fd().as_raw_fd()));
        self.page_io.wake_fds(&mut self.scratch);
        self.fds.clear();
        self.fds.extend(self.scratch.iter().map(|fd| (*fd, 0)));
        wakes.replace(&self.fds).map_err(|error| {
            self.page_io.disarm();
            ArmError::new(error)
        })
    }

    /// Does not check for faults: a fault that waits makes the descriptor readable, whenever it
    /// came.
    fn has_work(&mut self) -> bool {
        self.page_io.has_ended()
    }

    fn disarm(&mut self) {
        self.page_io.disarm();
    }

    fn deadline(&self) -> Option<Nanos> {
        let held = self.holds.deadline();
        let asks = self.residency.wants_to_ask() && self.ram.is_connected();
        let ask = asks.then_some(self.ask_at);
        let look = self.watermark.deadline();
        let preventer = self.preventer.as_ref().and_then(Preventer::deadline);
        let trim = self.residency.wants_to_trim().then_some(self.trim_at);
        let all = [held, self.retry_at, ask, look, preventer, trim];
        all.into_iter().flatten().min()
    }

    fn name(&self) -> &str {
        "pager"
    }
}

/// Returns whether two pages, both of which have been read, are adjacent in the file.
fn are_read_together(a: &(PageOp, Result<(), Errno>), b: &(PageOp, Result<(), Errno>)) -> bool {
    matches!(
        (a, b),
        ((PageOp::Fetch(a, _), Ok(())), (PageOp::Fetch(b, _), Ok(()))) if a.0 + 1 == b.0
    )
}

fn after(now: Nanos, time: Duration) -> Nanos {
    // A u64 of nanoseconds lasts for 500 years.
    Nanos(now.0.saturating_add(time.as_nanos() as u64))
}

#[cfg(test)]
mod tests;
