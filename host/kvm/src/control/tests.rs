use std::sync::Arc;

use super::*;

/// A thread that behaves like a vCPU's, with a short sleep for the guest.
fn fake_vcpu(control: &Arc<Control>) -> std::thread::JoinHandle<()> {
    let control = control.clone();
    crate::kick::install().unwrap();
    std::thread::spawn(move || {
        let thread = Thread::current();
        control.join(thread);
        while matches!(control.next(0), Next::Run) {
            std::thread::sleep(Duration::from_millis(1));
        }
        control.leave(thread);
    })
}

#[test]
fn the_first_reason_to_end_counts_and_all_threads_leave() {
    let control = Arc::new(Control::new().unwrap());
    let threads: Vec<_> = (0..3).map(|_| fake_vcpu(&control)).collect();
    control.end(End::PowerOff);
    control.end(End::Reset);
    assert_eq!(control.wait_for_end(), End::PowerOff);
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(control.wait_for_vcpus(Duration::ZERO));
}

#[test]
fn an_end_that_is_asked_for_leaves_the_machine_running_and_the_first_is_remembered() {
    let control = Control::new().unwrap();
    assert_eq!(control.asked(), None);
    control.ask(End::Signal(15));
    assert!(!control.is_over());
    control.end(End::Quit);
    control.end(End::PowerOff);
    assert_eq!(control.asked(), Some(End::Signal(15)));
    assert_eq!(control.wait_for_end(), End::Quit);
}

#[test]
fn pauses_nest_and_an_end_comes_through_them() {
    let control = Arc::new(Control::new().unwrap());
    let thread = fake_vcpu(&control);
    while control.wait_for_vcpus(Duration::ZERO) {
        std::thread::yield_now();
    }
    assert!(control.pause(Duration::from_secs(10)));
    assert!(control.pause(Duration::from_secs(10)));
    control.resume();
    assert_eq!(control.state().pauses, 1);
    assert!(!control.wait_for_vcpus(Duration::from_millis(5)));
    control.end(End::Quit);
    thread.join().unwrap();
}

#[test]
fn a_thread_that_does_not_park_is_told_but_the_pause_holds() {
    let control = Arc::new(Control::new().unwrap());
    crate::kick::install().unwrap();
    // This thread has joined and is busy here: kicked, it does not check the state.
    control.join(Thread::current());
    assert!(!control.pause(Duration::from_millis(5)));
    assert_eq!(control.state().pauses, 1);
    control.leave(Thread::current());
}

#[test]
fn only_the_parked_vcpu_that_is_meant_answers() {
    let Ok(kvm) = crate::vm::open_any() else {
        eprintln!("skipped: no /dev/kvm");
        return;
    };
    let vm = Arc::new(crate::Vm::bare(&kvm).unwrap());
    let control = Arc::new(Control::new().unwrap());
    crate::kick::install().unwrap();
    let threads: Vec<_> = (0..2)
        .map(|index| {
            let vcpu = crate::Vcpu::new(&vm, index).unwrap();
            let mut registers = vcpu.fd().get_regs().unwrap();
            registers.rax = 0x100 + u64::from(index);
            vcpu.fd().set_regs(&registers).unwrap();
            let control = control.clone();
            std::thread::spawn(move || {
                let thread = Thread::current();
                control.join(thread);
                loop {
                    match control.next(usize::from(index)) {
                        Next::Run => std::thread::yield_now(),
                        Next::Inspect(question) => question(vcpu.fd()),
                        Next::VcpuWork(visit) => visit(vcpu.fd(), true),
                        Next::Stop => break,
                    }
                }
                control.leave(thread);
            })
        })
        .collect();
    let patience = Duration::from_secs(10);
    let rax = |index| control.inspect(index, patience, |fd| fd.get_regs().unwrap().rax);
    assert_eq!(rax(0), None, "nothing is paused");
    while control.state().threads.len() < 2 {
        std::thread::yield_now();
    }
    // Each does what it was asked once, whether it runs or is parked.
    let visits = |count| {
        let (sender, done) = mpsc::channel();
        control.visit(count, |_| {
            let sender = sender.clone();
            Box::new(move |fd, _| sender.send(fd.get_regs().unwrap().rax).unwrap())
        });
        let mut rax: Vec<u64> = (0..2)
            .map(|_| done.recv_timeout(patience).unwrap())
            .collect();
        rax.sort_unstable();
        rax
    };
    assert_eq!(visits(2), [0x100, 0x101]);
    assert!(control.pause(patience));
    assert_eq!((rax(1), rax(0)), (Some(0x101), Some(0x100)));
    // Of a third there is no thread.
    assert_eq!(visits(3), [0x100, 0x101]);
    control.end(End::Quit);
    assert_eq!(rax(0), None, "the machine has ended");
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}
