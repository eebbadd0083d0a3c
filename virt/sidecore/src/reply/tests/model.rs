//! Loom's model of asking and answering: for every order of parking, answering and dropping, the
//! asker continues, with the answer if there was one.

use loom::thread;

use super::*;

#[test]
fn model_an_answer_arrives() {
    loom::model(|| {
        let (reply, answer) = reply();
        let poller = thread::spawn(move || reply.send(42));
        assert_eq!(answer.wait(), Some(42));
        poller.join().unwrap();
    });
}

#[test]
fn model_a_dropped_question_is_noticed() {
    loom::model(|| {
        let (reply, answer) = reply::<u32>();
        let poller = thread::spawn(move || drop(reply));
        assert_eq!(answer.wait(), None);
        poller.join().unwrap();
    });
}
