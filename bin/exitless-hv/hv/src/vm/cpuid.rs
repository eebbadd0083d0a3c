//! CPUID: what the guest is not to know of, or to do otherwise.

use bare::processor;

use super::Processor;
use crate::pages::{RBX, RCX, RDX};
use crate::report::Cause;
use crate::vmcb;

impl Processor {
    pub(super) fn cpuid(&mut self) -> Cause {
        let vmcb = &mut self.pages.vmcb;
        let words = &mut self.pages.registers.words;
        let leaf = vmcb.get(vmcb::RAX) as u32;
        let [mut a, mut b, mut c, mut d] = processor::cpuid(leaf, words[RCX] as u32);
        let cr4 = vmcb.get(vmcb::CR4);
        let mirror = |word: u32, bit: u32, on: bool| word & !(1 << bit) | u32::from(on) << bit;
        match leaf {
            // A hypervisor is there; no MONITOR, no deadline timer, and OSXSAVE is the guest's.
            1 => c = mirror(c & !(1 << 3 | 1 << 24) | 1 << 31, 27, cr4 & 1 << 18 != 0),
            // No five levels of paging, and OSPKE is the guest's.
            7 => c = mirror(c & !(1 << 16), 4, cr4 & 1 << 22 != 0),
            // No virtualization inside, nor its leaf.
            0x8000_0001 => c &= !(1 << 2),
            0x8000_000a => [a, b, c, d] = [0; 4],
            // A hypervisor vouches for x2APIC, without which Linux turns it off where there is no
            // interrupt remapping. It has KVM's name and none of its features.
            0x4000_0000 => [a, b, c, d] = [0x4000_0001, 0x4b4d_564b, 0x564b_4d56, 0x4d],
            0x4000_0001 => [a, b, c, d] = [0; 4],
            _ => {}
        }
        vmcb.set(vmcb::RAX, u64::from(a));
        words[RBX] = u64::from(b);
        words[RCX] = u64::from(c);
        words[RDX] = u64::from(d);
        vmcb.skip(2);
        Cause::Guest
    }
}
