//! Mappings of random size, made and ended in random order. Each is compared with the accesses that
//! the device can then make.
//!
//! A layer below (a shadow of these mappings, IO page tables with large pages) may join neighbours
//! whose memory is contiguous, and then has to split them when one of them ends. So half of the
//! mappings continue another one, and some are halves of 2 MiB, aligned in IOVAs and in memory.
//!
//! Cost: a copy of `edu` takes a tenth of a second, and a step two to six of them.

use std::time::Duration;

use dma_map::iova::Access;

use super::model::{Model, Piece};
use super::{COPY, CopyDevice, PAGE, content, drain, fill, peek};
use crate::pattern::Random;

/// IOVA of the window, at 2 MiB, and its pages.
const WINDOW_IOVA: u64 = 0x0200_0000;
const WINDOW_PAGES: usize = 2048;
/// Pages of memory: two large pages.
const MEMORY_PAGES: usize = 1024;
/// Pages of a large page, and of its half.
const LARGE: usize = 512;
const HALF: usize = LARGE / 2;
/// Largest mapping except for those, pages.
const PIECE_MAX: u64 = 64;
/// Mappings at a time: a step that would make more ends one instead.
const PIECES_MAX: usize = 64;

/// Options of [`run`].
#[derive(Clone, Copy, Debug)]
pub struct PiecesConfig {
    /// Number of steps: a mapping is made, or ended, in each.
    pub count: u64,
    /// Seed of sizes and order.
    pub seed: u64,
    /// Time between the end of a mapping and the access to what it mapped.
    pub wait: Duration,
}

/// Counts of a [`run`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PiecesReport {
    /// Mappings made.
    pub maps: u64,
    /// Mappings ended.
    pub unmaps: u64,
    /// Ends of mappings that another one continued, or that continued another one.
    pub cuts: u64,
    /// Copies through mappings, each compared.
    pub copies: u64,
    /// Writes to memory that had been unmapped just before.
    pub rogues: u64,
    /// Those of them that arrived.
    pub arrived: u64,
}

/// Makes and ends mappings, after [`prove`](super::prove).
///
/// # Errors
/// A mapped DMA access did not arrive, memory has wrong content, or the device's or system's own. A
/// write to unmapped memory that arrived is in the report, and ends the run.
pub fn run(device: &mut impl CopyDevice, config: &PiecesConfig) -> Result<PiecesReport, String> {
    let base = device.large_at();
    let model = Model::new(WINDOW_PAGES, MEMORY_PAGES);
    device.write(base, model.memory());
    let mut run = Run {
        random: Random::new(config.seed),
        wait: config.wait,
        number: 1 << 32,
        base,
        model,
        report: PiecesReport::default(),
        device,
    };
    for _ in 0..config.count {
        run.step()?;
        if run.report.arrived > 0 {
            return Ok(run.report);
        }
    }
    while let Some(piece) = run.model.nth(0) {
        run.unmap(piece)?;
    }
    run.check_memory()?;
    Ok(run.report)
}

struct Run<'a, D> {
    device: &'a mut D,
    random: Random,
    wait: Duration,
    /// Number of the next copy's content.
    number: u64,
    /// First byte of the memory that is mapped.
    base: usize,
    model: Model,
    report: PiecesReport,
}

impl<D: CopyDevice> Run<'_, D> {
    fn below(&mut self, limit: usize) -> usize {
        let number = self.random.below(limit as u64);
        usize::try_from(number).expect("below a usize")
    }

    fn step(&mut self) -> Result<(), String> {
        let choice = match self.model.len() {
            0 => 0,
            PIECES_MAX.. => 7,
            _ => self.below(8),
        };
        let made = match choice {
            0..4 => self.map_piece()?,
            4 => self.map_halves()?,
            _ => false,
        };
        if made {
            return Ok(());
        }
        let rank = self.below(self.model.len().max(1));
        match self.model.nth(rank) {
            Some(piece) => self.end(piece),
            None => Ok(()),
        }
    }

    /// Maps a piece, if there is room at its place; behind another one in half of the cases.
    fn map_piece(&mut self) -> Result<bool, String> {
        let pages = 1 + self.below(PIECE_MAX as usize);
        let continued = match self.below(2) {
            0 => None,
            _ => {
                let rank = self.below(self.model.len().max(1));
                self.model.nth(rank)
            }
        };
        let piece = match continued {
            Some(before) => Piece {
                first: before.end(),
                pages,
                memory: before.memory + before.pages,
            },
            None => Piece {
                first: self.below(WINDOW_PAGES),
                pages,
                memory: self.below(MEMORY_PAGES - pages),
            },
        };
        let fits =
            self.model.is_free(piece.first, pages) && self.model.has_memory(piece.memory, pages);
        if fits {
            self.map(piece)?;
            self.copy_through(piece)?;
        }
        Ok(fits)
    }

    /// Maps the halves of a large page, or the whole at once, if there is room.
    fn map_halves(&mut self) -> Result<bool, String> {
        let first = LARGE * self.below(WINDOW_PAGES / LARGE);
        let memory = LARGE * self.below(MEMORY_PAGES / LARGE);
        if !self.model.is_free(first, LARGE) {
            return Ok(false);
        }
        let pages = if self.below(3) == 0 { LARGE } else { HALF };
        for part in (0..LARGE).step_by(pages) {
            let piece = Piece {
                first: first + part,
                pages,
                memory: memory + part,
            };
            self.map(piece)?;
            self.copy_through(piece)?;
        }
        Ok(true)
    }

    fn map(&mut self, piece: Piece) -> Result<(), String> {
        let at = self.base + piece.memory * PAGE;
        self.device
            .map(iova(piece.first), at, piece.pages * PAGE, Access::ReadWrite)?;
        self.model.insert(piece);
        self.report.maps += 1;
        Ok(())
    }

    fn unmap(&mut self, piece: Piece) -> Result<(), String> {
        self.device.unmap(iova(piece.first), piece.pages * PAGE)?;
        self.model.remove(piece);
        self.report.unmaps += 1;
        Ok(())
    }

    /// Ends a mapping. The device must no longer reach its memory, and must still reach its
    /// neighbours.
    fn end(&mut self, piece: Piece) -> Result<(), String> {
        let offset = self.offset_in(piece);
        let data = self.next_content();
        fill(self.device, &data)?;
        self.unmap(piece)?;
        if !self.wait.is_zero() {
            self.device.pause(self.wait);
        }
        self.device.store(iova(piece.first) + offset as u64)?;
        self.report.rogues += 1;
        let at = piece.memory * PAGE + offset;
        if peek(self.device, self.base + at) != self.model.memory()[at..][..COPY] {
            self.report.arrived += 1;
            return Ok(());
        }
        let neighbours: Vec<Piece> = self.model.neighbours(piece).collect();
        self.report.cuts += u64::from(!neighbours.is_empty());
        for neighbour in neighbours {
            self.copy_through(neighbour)?;
        }
        Ok(())
    }

    /// Copies in one direction through a mapping, and compares.
    fn copy_through(&mut self, piece: Piece) -> Result<(), String> {
        let offset = self.offset_in(piece);
        let at = piece.memory * PAGE + offset;
        let address = iova(piece.first) + offset as u64;
        let data = self.next_content();
        self.model.write(at, &data);
        let got = if self.below(2) == 0 {
            fill(self.device, &data)?;
            self.device.store(address)?;
            peek(self.device, self.base + at)
        } else {
            self.device.write(self.base + at, &data);
            self.device.load(address)?;
            drain(self.device)?
        };
        self.report.copies += 1;
        if got != data {
            return Err(format!(
                "a copy at {address:#x}, in a mapping of {} pages at {:#x}, did not arrive",
                piece.pages,
                iova(piece.first)
            ));
        }
        Ok(())
    }

    /// Returns the offset of a copy in a mapping: across the border of two pages in half of the
    /// cases in which there are two.
    fn offset_in(&mut self, piece: Piece) -> usize {
        if piece.pages > 1 && self.below(2) == 0 {
            let page = 1 + self.below(piece.pages - 1);
            return page * PAGE - COPY / 2;
        }
        let page = self.below(piece.pages);
        page * PAGE + 8 * self.below((PAGE - COPY) / 8)
    }

    fn next_content(&mut self) -> [u8; COPY] {
        self.number += 1;
        content(self.number)
    }

    /// Compares all memory that was mapped: a copy to a wrong place is found here.
    fn check_memory(&self) -> Result<(), String> {
        let mut now = vec![0; MEMORY_PAGES * PAGE];
        self.device.read(self.base, &mut now);
        let wrong = now
            .iter()
            .zip(self.model.memory())
            .position(|(a, b)| a != b);
        match wrong {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {at:#x} of the memory that was mapped is not what was copied there"
            )),
        }
    }
}

/// Returns the IOVA of a page of the window.
fn iova(page: usize) -> u64 {
    WINDOW_IOVA + (page * PAGE) as u64
}
