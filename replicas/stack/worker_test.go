package stack

import (
	"strings"
	"testing"
)

// TestWorkerPanicsInTheCaller: what panics in the worker panics where it is waited for, and the worker goes on.
func TestWorkerPanicsInTheCaller(t *testing.T) {
	w := newWorker()
	defer w.close()
	p := panicOf(func() { w.do(func() { panic("a defect") }) })
	if text, ok := p.(string); !ok || !strings.Contains(text, "a defect") || !strings.Contains(text, "worker_test.go") {
		t.Errorf("%v", p)
	}
	ran := false
	w.do(func() { ran = true })
	if !ran {
		t.Error("the worker has ended")
	}
}
