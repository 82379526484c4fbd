package tree

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

var (
	one, two = blob.Sum([]byte("one")), blob.Sum([]byte("two"))
	nodes    = []Node{
		{Name: "0001", Type: Folder, Subtree: one},
		{Name: "data", Type: File, Size: 6, Content: []blob.ID{one, two}},
		{Name: "empty", Type: File},
	}
)

// encoded has the bytes of nodes as restic 0.14 and 0.19 write them.
const encoded = `{"nodes":[` +
	`{"name":"0001","type":"dir","mode":2147484096,"mtime":"1970-01-01T00:00:00Z","atime":"1970-01-01T00:00:00Z",` +
	`"ctime":"1970-01-01T00:00:00Z","uid":0,"gid":0,"content":null,` +
	`"subtree":"7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"},` +
	`{"name":"data","type":"file","mode":384,"mtime":"1970-01-01T00:00:00Z","atime":"1970-01-01T00:00:00Z",` +
	`"ctime":"1970-01-01T00:00:00Z","uid":0,"gid":0,"size":6,"content":[` +
	`"7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",` +
	`"3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"]},` +
	`{"name":"empty","type":"file","mode":384,"mtime":"1970-01-01T00:00:00Z","atime":"1970-01-01T00:00:00Z",` +
	`"ctime":"1970-01-01T00:00:00Z","uid":0,"gid":0,"content":[]}]}` + "\n"

// TestEncodeWritesResticsBytes: the bytes of a tree are fixed, and Decode returns the nodes.
func TestEncodeWritesResticsBytes(t *testing.T) {
	b, err := Encode(nodes)
	if err != nil || string(b) != encoded {
		t.Errorf("Encode: %v\n%s\nwant\n%s", err, b, encoded)
	}
	got, err := Decode(b)
	if err != nil || len(got) != 3 || !reflect.DeepEqual(got[:2], nodes[:2]) || got[2].Name != "empty" {
		t.Errorf("Decode: %+v, %v", got, err)
	}
	empty, err := Encode(nil)
	if err != nil || string(empty) != "{\"nodes\":[]}\n" {
		t.Errorf("Encode of no nodes: %q, %v", empty, err)
	}
}

// TestEncodeRefusesWrongNodes: names that a restore could not write, unsorted nodes and unknown types.
func TestEncodeRefusesWrongNodes(t *testing.T) {
	for _, wrong := range [][]Node{
		{{Type: File}},
		{{Name: "..", Type: File}},
		{{Name: "a/b", Type: File}},
		{{Name: "a\"b", Type: File}},
		{{Name: "a", Type: "symlink"}},
		{{Name: "b", Type: File}, {Name: "a", Type: File}},
		{{Name: "a", Type: File}, {Name: "a", Type: Folder}},
	} {
		if _, err := Encode(wrong); !api.Is(err, api.Invalid) {
			t.Errorf("%+v: %v, want an error of kind invalid", wrong, err)
		}
	}
}

// TestDecodeNeedsFewFields: a field that Decode does not need may have any value.
func TestDecodeNeedsFewFields(t *testing.T) {
	for _, field := range []string{`"mtime":"12345-01-01T00:00:00Z"`, `"uid":-1`, `"gid":4294967296`, `"atime":""`} {
		if _, err := Decode([]byte(`{"nodes":[{"name":"a","type":"file",` + field + `,"content":[]}]}`)); err != nil {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestDecodeReadsForeignNodes: a tree of another program has other types, fields and names.
func TestDecodeReadsForeignNodes(t *testing.T) {
	got, err := Decode([]byte(`{"x":{"nodes":[1]},"nodes":[{"name":"a\\nb","type":"symlink","linktarget":"x",` +
		`"content":null},{"type":"file","name":"f","size":3,"links":2,"content":["` + one.String() + `"]}],"y":[]}`))
	want := []Node{{Name: `a\nb`, Type: "symlink"}, {Name: "f", Type: File, Size: 3, Content: []blob.ID{one}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
}

var refused = []string{
	``, `{`, `[]`, `null`, `{}x`, `{"nodes":{}}`, `{"nodes":[{}]}`, `{"nodes":[null]}`, `{"nodes":[{"name":"a"}]}`,
	`{"nodes":[{"type":"file"}]}`, `{"nodes":[{"name":"a","type":"dir"}]}`,
	`{"nodes":[{"name":"a","type":"file","size":-1}]}`,
	`{"nodes":[{"name":"a","type":"file","size":9223372036854775808}]}`,
	`{"nodes":[{"name":"a","type":"file","content":["00"]}]}`,
	`{"nodes":[{"name":"a","type":"file","content":[null]}]}`, `{"nodes":[{"name":"a","type":"file","content":"x"}]}`,
	`{"nodes":[` + strings.Repeat("[", 20_000) + `]}`,
}

// TestDecodeRefusesDamage: each refused tree, and a whole tree cut anywhere, is an error of kind corrupt.
func TestDecodeRefusesDamage(t *testing.T) {
	trees := refused
	for n := range len(encoded) - 1 {
		trees = append(trees, encoded[:n])
	}
	for _, tree := range trees {
		if _, err := Decode([]byte(tree)); !api.Is(err, api.Corrupt) {
			t.Errorf("%.200s: %v, want an error of kind corrupt", tree, err)
		}
	}
}

// FuzzDecode: Decode refuses bytes that encoding/json refuses, and never returns a node that breaks the invariants.
func FuzzDecode(f *testing.F) {
	for _, tree := range append(refused, encoded) {
		f.Add([]byte(tree))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		nodes, err := Decode(b)
		switch {
		case err != nil && !api.Is(err, api.Corrupt):
			t.Errorf("%v, want an error of kind corrupt", err)
		case err == nil && !json.Valid(b):
			t.Error("Decode accepts bytes that are no JSON")
		}
		for _, n := range nodes {
			if n.Name == "" || n.Type == "" || n.Size < 0 {
				t.Errorf("Decode returns the node %+v", n)
			}
		}
	})
}
