// Package tree owns the encoding of a tree: the blob that lists the nodes of a folder, as JSON. restic's design
// document ("Trees and Data") has the format, internal/restic/node.go of restic the order of the fields.
//
// Invariants: Encode writes the bytes that restic would write for the same nodes, so restic can change the folder
// round a tree (`restic rewrite`). Equal nodes have equal trees: Encode writes no times, owners or inodes of a
// machine. Decode returns only nodes with a name and a type, and folders only with a subtree.
//
// The package has no state and starts no goroutine.
package tree

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// The types of nodes that Drover writes. Other programs write more.
const (
	File   = "file"
	Folder = "dir"
)

// Modes of the nodes that Drover writes: the owner alone may read them.
const (
	fileMode   = fs.FileMode(0o600)
	folderMode = fs.ModeDir | 0o700
)

// Node is a file or folder in a tree.
type Node struct {
	Name    string // of Drover's nodes: letters, digits, '.', '_' and '-'; of others as Go quotes strings
	Type    string
	Size    int64     // bytes of a file
	Content []blob.ID // of a file: data blobs, one after the other
	Subtree blob.ID   // of a folder: a tree blob
}

// encodedNode is a node in JSON, with the fields that Drover writes in restic's order.
type encodedNode struct {
	Name     string      `json:"name"`
	Type     string      `json:"type"`
	Mode     fs.FileMode `json:"mode,omitempty"`
	Modified time.Time   `json:"mtime"`
	Accessed time.Time   `json:"atime"`
	Changed  time.Time   `json:"ctime"`
	UID      uint32      `json:"uid"`
	GID      uint32      `json:"gid"`
	Size     uint64      `json:"size,omitempty"`
	Content  []blob.ID   `json:"content"`
	Subtree  *blob.ID    `json:"subtree,omitempty"`
}

// Encode encodes nodes, sorted by name. Wrong nodes are an error of kind Invalid.
func Encode(nodes []Node) ([]byte, error) {
	tree := struct {
		Nodes []encodedNode `json:"nodes"`
	}{make([]encodedNode, len(nodes))}
	epoch := time.Unix(0, 0).UTC()
	for i, n := range nodes {
		if !isPlainName(n.Name) || i > 0 && nodes[i-1].Name >= n.Name {
			return nil, api.Errorf(api.Invalid, "tree: node %.64q has a wrong name or place; nodes are sorted by name", n.Name)
		}
		e := encodedNode{Name: n.Name, Type: n.Type, Mode: fileMode, Modified: epoch, Accessed: epoch, Changed: epoch}
		switch n.Type {
		case File:
			e.Size, e.Content = uint64(n.Size), n.Content
			if e.Content == nil {
				e.Content = []blob.ID{} // restic reads null as a file without content information
			}
		case Folder:
			e.Mode, e.Subtree = folderMode, &n.Subtree
		default:
			return nil, api.Errorf(api.Invalid, "tree: node %s has the unknown type %.16q", n.Name, n.Type)
		}
		tree.Nodes[i] = e
	}
	b, err := json.Marshal(tree)
	return append(b, '\n'), err
}

func isPlainName(name string) bool {
	for _, c := range []byte(name) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return name != "" && name != "." && name != ".."
}

// Decode reads a tree that any program wrote. An error of kind Corrupt says that the bytes are no tree.
func Decode(plain []byte) ([]Node, error) {
	d := decoder{json: json.NewDecoder(bytes.NewReader(plain))}
	d.expect(json.Delim('{'))
	for d.err == nil && d.json.More() {
		if key, _ := d.token().(string); key == "nodes" {
			d.readNodes()
		} else {
			d.decode(new(json.RawMessage))
		}
	}
	d.expect(json.Delim('}'))
	if d.err == nil {
		if _, err := d.json.Token(); !errors.Is(err, io.EOF) {
			d.err = errors.New("bytes follow the JSON")
		}
	}
	if d.err != nil {
		return nil, api.Errorf(api.Corrupt, "tree: no JSON of a tree: %w", d.err)
	}
	return d.nodes, nil
}

// decodedNode has the fields of a node that Decode needs: others may be of any kind.
type decodedNode struct {
	Name    string    `json:"name"`
	Type    string    `json:"type"`
	Size    uint64    `json:"size"`
	Content []blob.ID `json:"content"`
	Subtree *blob.ID  `json:"subtree"`
}

// decoder decodes node by node: memory stays in proportion to the tree, whatever the JSON.
type decoder struct {
	json  *json.Decoder
	nodes []Node
	err   error
}

func (d *decoder) token() (t json.Token) {
	if d.err == nil {
		t, d.err = d.json.Token()
	}
	return t
}

func (d *decoder) expect(want json.Delim) {
	if t := d.token(); d.err == nil && t != want {
		d.err = errors.New("the JSON has another structure")
	}
}

func (d *decoder) decode(to any) {
	if d.err == nil {
		d.err = d.json.Decode(to)
	}
}

func (d *decoder) readNodes() {
	d.expect(json.Delim('['))
	for d.err == nil && d.json.More() {
		var e decodedNode
		if d.decode(&e); d.err != nil {
			return
		}
		n := Node{Name: e.Name, Type: e.Type, Size: int64(e.Size), Content: e.Content}
		switch {
		case n.Name == "" || n.Type == "" || n.Size < 0:
			d.err = errors.New("a node lacks its name or type, or has a wrong size")
		case slices.Contains(n.Content, blob.ID{}):
			d.err = errors.New("a file lacks the id of a blob")
		case n.Type == Folder && e.Subtree == nil:
			d.err = errors.New("a folder lacks its subtree")
		case e.Subtree != nil:
			n.Subtree = *e.Subtree
		}
		d.nodes = append(d.nodes, n)
	}
	d.expect(json.Delim(']'))
}
