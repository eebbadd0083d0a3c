use std::io::Read;
use std::time::{Duration, Instant};

use super::*;
use guest_mem::SourceId;
use platform::interrupt::{InterruptSink, Message};
use platform::ioapic::{RouteSink, Routes};
use platform::layout;

#[derive(Default)]
struct Messages(Mutex<Vec<u32>>);

impl InterruptSink for Messages {
    fn send(&self, _from: SourceId, message: Message) {
        self.0.lock().unwrap().push(message.data);
    }
}

impl RouteSink for Messages {
    fn update(&self, _routes: &Routes) {}
}

fn uart(output: Sink) -> (Arc<Uart>, Arc<Messages>) {
    let messages = Arc::new(Messages::default());
    let ioapic = Arc::new(Ioapic::new(
        layout::IOAPIC_SOURCE,
        messages.clone(),
        messages.clone(),
    ));
    ioapic.write(0, &[0x18]);
    ioapic.write(0x10, &0x55u32.to_le_bytes());
    (Arc::new(Uart::new(ioapic, 4, output).unwrap()), messages)
}

#[test]
fn written_bytes_reach_the_output_and_string_writes_write_each() {
    let (mut screen, writer) = io::pipe().unwrap();
    let (uart, _) = uart(Sink::start("screen", writer).unwrap());
    uart.write(0, b"o");
    uart.write(0, b"k\n");
    let mut bytes = [0; 3];
    screen.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"ok\n");
}

#[test]
fn a_vcpu_whose_output_nobody_reads_keeps_neither_the_chip_nor_the_machines_end_waiting() {
    let (_unread, writer) = io::pipe().unwrap();
    let output = Sink::start("screen", writer).unwrap();
    let (uart, _) = uart(output.clone());
    let vcpu = std::thread::spawn({
        let uart = uart.clone();
        // More than the pipe and the sink hold.
        move || {
            (0..4 * Sink::CAPACITY).for_each(|_| {
                let _ = uart.write(0, b"x");
            })
        }
    });
    let deadline = Instant::now() + Duration::from_secs(10);
    while output.offer(b"is there room?") {
        assert!(Instant::now() < deadline, "it never filled up");
    }
    // The chip is free, for another vCPU and for the console's thread.
    uart.read(5, &mut [0]);
    assert_eq!(uart.offer(b"typed"), 5);
    output.let_go();
    vcpu.join().unwrap();
}

#[test]
fn typing_interrupts_and_more_than_the_buffer_is_taken_as_the_guest_reads() {
    let (uart, messages) = uart(Sink::nowhere());
    uart.write(1, &[1]);
    let mut left = 200;
    let mut read = 0;
    while read < 200 {
        let taken = uart.offer(&vec![b'x'; left]);
        left -= taken;
        assert!(uart.emptied.read().is_err(), "before the guest has read");
        loop {
            let mut status = [0];
            uart.read(5, &mut status);
            if status[0] & 1 == 0 {
                break;
            }
            uart.read(0, &mut [0]);
            read += 1;
        }
        assert_eq!(uart.emptied.read().is_ok(), left > 0, "{left} left");
    }
    assert!(messages.0.lock().unwrap().iter().all(|data| *data == 0x55));
    assert!(!messages.0.lock().unwrap().is_empty());
}

#[test]
fn a_full_buffer_takes_nothing_and_nobody_waits() {
    let (uart, _) = uart(Sink::nowhere());
    assert_eq!(uart.offer(&[b'x'; 100]), 64);
    assert_eq!(uart.offer(b"y"), 0);
    uart.read(0, &mut [0]);
    assert!(uart.emptied.read().is_err(), "63 are left to read");
    assert_eq!(uart.offer(b"y"), 1);
}

/// Linux reads 256 bytes for an interrupt, and asks the chip whether there is more. (A line of more
/// than that, typed at once, stood in the buffer until something else was typed.)
#[test]
fn bytes_that_are_left_behind_a_read_are_told_of_when_the_interrupt_is_identified() {
    let (uart, messages) = uart(Sink::nowhere());
    uart.write(1, &[1]);
    let identify = || {
        let mut iir = [0];
        uart.read(2, &mut iir);
        iir[0] & 0xf
    };
    assert_eq!(uart.offer(&[b'x'; 64]), 64);
    for left in (0..64).rev() {
        assert_eq!(identify(), 4, "{left} are left behind this one");
        uart.read(0, &mut [0]);
    }
    assert_eq!(identify(), 1, "nothing is left");
    let sent = messages.0.lock().unwrap().len();
    assert_eq!(identify(), 1);
    assert_eq!(messages.0.lock().unwrap().len(), sent);
    // No interrupt while the driver has it disabled.
    uart.offer(b"y");
    uart.write(1, &[0]);
    identify();
    assert_eq!(identify(), 1);
    uart.write(1, &[1]);
    assert_eq!(identify(), 4);
}
