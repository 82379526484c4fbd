package driver

import (
	"encoding/json"
	"os"
	"testing"
)

// TestPidFileIsReadAndWrittenAsBefore: testdata/v1 has the file of a data process of a released version. A later
// version learns from the file which process serves the state folder.
func TestPidFileIsReadAndWrittenAsBefore(t *testing.T) {
	was, err := os.ReadFile("testdata/v1/data.pid")
	if err != nil {
		t.Fatal(err)
	}
	var got pidFile
	want := pidFile{Pid: 4711, Build: "v0 2049:131:1764174155.5", API: "https://127.0.0.1:6443"}
	if err := json.Unmarshal(was, &got); err != nil || got != want {
		t.Errorf("the file says %+v, %v; it said %+v", got, err, want)
	}
	if now, err := json.Marshal(want); err != nil || string(now) != string(was) {
		t.Errorf("the file is written as\n%s\nand was\n%s: %v", now, was, err)
	}
}
