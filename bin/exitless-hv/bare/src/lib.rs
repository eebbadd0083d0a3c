//! Support for programs that run on no operating system: the way into long mode, memory functions,
//! ports, registers, text.
//!
//! **What.** `boot.s` takes over from a multiboot loader and calls the program's
//! `bare_main(magic, information)` in 64-bit mode, with the first 512 GiB mapped as they are,
//! interrupts off, and a stack of 64 KiB. The program defines that function and a panic handler;
//! `mem` is what the compiler calls by name.
//!
//! **Who.** `exitless-hv`, and the guests that attack it. One processor; other processors enter by
//! `bare_long_mode`.
//!
//! **Left out.** An allocator, threads, exceptions: the programs have fixed memory, and handlers of
//! their own.
#![no_std]

pub mod apic;
mod mem;
pub mod multiboot;
pub mod pci;
pub mod pic;
pub mod port;
pub mod processor;
mod stubs;
pub mod text;

use core::arch::global_asm;

global_asm!(include_str!("boot.s"), options(att_syntax));
