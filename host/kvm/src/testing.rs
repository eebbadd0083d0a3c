//! A guest of a few instructions in 64-bit user mode, for this crate's tests: software KVM runs it
//! too.

use std::io;
use std::sync::Arc;

use guest_mem::{Gpa, GuestRam, PhysMem};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuExit;

use crate::{Vcpu, Vm, cpuid};

/// Bytes of RAM, from guest-physical 0: one large page, mapped one to one.
const RAM_SIZE: u64 = 2 << 20;
/// Address of the instructions.
const CODE: u64 = 0x1_0000;

/// PML4, PDPT, and a directory for each GiB.
const PAGE_TABLES: u64 = 0x1000;
const TASK: u64 = 0x9000;

/// Puts `code` and page tables into RAM. The large pages (2 MiB, below 512 GiB) at the addresses
/// `devices` are mapped one to one and uncached, at most six GiB of them.
fn load(ram: &impl PhysMem, code: &[u8], devices: &[u64]) {
    const LINK: u64 = 0b111;
    const LARGE: u64 = 1 << 7;
    const UNCACHED: u64 = 0b11 << 3;
    let write = |at: u64, bytes: &[u8]| ram.write(Gpa::new(at), bytes).unwrap();
    let word = |at: u64, value: u64| write(at, &value.to_le_bytes());
    let table = |number: u64| PAGE_TABLES + 0x1000 * number;
    write(CODE, code);
    word(table(0), table(1) | LINK);
    let mut gibs = vec![0];
    word(table(1), table(2) | LINK);
    word(table(2), LINK | LARGE);
    for device in devices {
        let gib = device >> 30;
        let known = gibs.iter().position(|known| *known == gib);
        let index = known.unwrap_or_else(|| {
            gibs.push(gib);
            gibs.len() - 1
        });
        let directory = table(2 + index as u64);
        assert!(directory < TASK, "more GiB than there is room for");
        word(table(1) + 8 * gib, directory | LINK);
        word(
            directory + 8 * (device >> 21 & 0x1ff),
            device | LINK | LARGE | UNCACHED,
        );
    }
}

/// Sets up 64-bit user mode on the page tables of [`load`]; the rest of `sregs` stays as it is
/// after reset.
fn user_mode(sregs: &mut kvm_sregs) {
    const CR0_PE_MP_ET_NE_WP_AM_PG: u64 = 0x8005_0033;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;
    let segment = |selector, type_, is_long: bool| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: u8::from(!is_long),
        s: 1,
        l: u8::from(is_long),
        g: 1,
        ..Default::default()
    };
    let data = segment(0x2b, 3, false);
    sregs.cs = segment(0x33, 0xb, true);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: TASK,
        limit: 0x67,
        selector: 0x40,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    sregs.cr0 = CR0_PE_MP_ET_NE_WP_AM_PG;
    sregs.cr3 = PAGE_TABLES;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME_LMA;
}

/// An access that exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A read, to be answered.
    Read(u64),
    /// A write of up to eight bytes.
    Write(u64, u64),
}

/// A machine of one vCPU.
pub struct Guest {
    pub vm: Arc<Vm>,
    pub vcpu: Vcpu,
}

impl Guest {
    /// Creates a machine with these instructions, and large pages of devices as in [`load`];
    /// `None`, with the reason printed, where there is no KVM.
    pub fn new(code: &[u8], devices: &[u64]) -> Option<Self> {
        let kvm = match crate::vm::open_any() {
            Ok(kvm) => kvm,
            Err(error) => {
                eprintln!("skipped: {error}");
                return None;
            }
        };
        let ram = GuestRam::new(&[(Gpa::new(0), RAM_SIZE)]).unwrap();
        load(&ram, code, devices);
        let vm = Arc::new(Vm::bare(&kvm).unwrap());
        vm.map_ram(&ram).unwrap();
        let vcpu = Vcpu::new(&vm, 0).unwrap();
        let cpuid = cpuid::for_vcpu(&cpuid::supported(&kvm).unwrap(), 0, 1);
        vcpu.fd().set_cpuid2(&cpuid).unwrap();
        let mut sregs = vcpu.fd().get_sregs().unwrap();
        user_mode(&mut sregs);
        vcpu.fd().set_sregs(&sregs).unwrap();
        Some(Self { vm, vcpu })
    }

    /// Puts it at its first instruction, with these registers.
    pub fn start(&mut self, registers: kvm_regs) {
        let registers = kvm_regs {
            rip: CODE,
            rflags: 2,
            ..registers
        };
        self.vcpu.fd().set_regs(&registers).unwrap();
    }

    /// Runs it to its next access that exits; a read is answered with `answer`.
    pub fn run(&mut self, answer: u32) -> Exit {
        loop {
            match self.vcpu.fd_mut().run() {
                Ok(VcpuExit::MmioRead(address, data)) => {
                    data.copy_from_slice(&answer.to_le_bytes()[..data.len()]);
                    return Exit::Read(address);
                }
                Ok(VcpuExit::MmioWrite(address, data)) => {
                    let mut value = [0; 8];
                    value[..data.len()].copy_from_slice(data);
                    return Exit::Write(address, u64::from_le_bytes(value));
                }
                Ok(exit) => panic!("unexpected exit {exit:?}"),
                Err(error) => {
                    let error = io::Error::from(error);
                    assert_eq!(error.kind(), io::ErrorKind::Interrupted, "{error}");
                }
            }
        }
    }
}
