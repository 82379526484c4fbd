package stack

import (
	"strings"
	"testing"
)

// TestWorkerPanicsInTheCaller: a panic in the worker becomes a panic in the waiting caller, and the worker continues.
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
