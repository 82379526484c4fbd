package kubeapi

import (
	"encoding/json"
	"os"
	"testing"
)

// TestHistoryIsReadAndWrittenAsBefore: testdata/v1 has the history of a state database from a released version. A later
// version learns from the history whether the database went back.
func TestHistoryIsReadAndWrittenAsBefore(t *testing.T) {
	was, err := os.ReadFile("testdata/v1/" + lineageFile)
	if err != nil {
		t.Fatal(err)
	}
	var got lineage
	want := lineage{Start: "c0ffee", Revision: 1234, Clean: true}
	if err := json.Unmarshal(was, &got); err != nil || got != want {
		t.Errorf("the file says %+v, %v; it said %+v", got, err, want)
	}
	if now, err := json.Marshal(want); err != nil || string(now) != string(was) {
		t.Errorf("the file is written as\n%s\nand was\n%s: %v", now, was, err)
	}
}
