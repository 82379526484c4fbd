package sanity_test

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "drover.io/drover"

// golist is the output of `go list -json` for a package of the module: without tests, whose imports may go anywhere.
type golist struct {
	ImportPath string
	Name       string
	Standard   bool
	Imports    []string
	Deps       []string // transitive
}

func packages(t *testing.T) (ours []golist, standard map[string]bool) {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Name,Standard,Imports,Deps", "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	standard = map[string]bool{}
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var p golist
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		switch {
		case p.Standard:
			standard[p.ImportPath] = true
		case under(p.ImportPath, module):
			ours = append(ours, p)
		}
	}
	if len(ours) == 0 {
		t.Fatal("go list found no package of ours")
	}
	return ours, standard
}

// under reports whether package p is root or below it.
func under(p, root string) bool { return p == root || strings.HasPrefix(p, root+"/") }

func underAny(p string, roots ...string) bool {
	return slices.ContainsFunc(roots, func(r string) bool { return under(p, module+"/"+r) })
}

// wall says which packages of the module the packages below `of` may have among their transitive imports. Inside a
// room, a wall of a folder stands besides the wall of the room.
type wall struct {
	of  []string
	may []string // besides its own tree
	why string
}

var walls = []wall{
	{[]string{"api"}, nil, "api is the contract that everybody imports, so it imports none of ours"},
	{[]string{"block"}, nil, "block is the one verb; it knows no room"},
	{[]string{"identity", "controller", "node"}, []string{"api", "block"}, "a door translates requests into objects"},
	{[]string{"imagestore"}, []string{"api", "block"}, "rooms meet in the API objects and in block, never by import"},
	{[]string{"imagestore/planner"}, []string{"api", "block"},
		"the planner decides from API objects alone; it shares no type with the nodes that carry decisions out"},
	{[]string{"imagestore/host"},
		[]string{"api", "block", "imagestore/importer", "imagestore/archive", "imagestore/format", "imagestore/origin"},
		"the host carries decisions out that it reads from API objects, never from the planner"},
	{[]string{"imagestore/format", "imagestore/archive"}, []string{"api", "block"},
		"a format or an archive is bytes; it knows neither origins nor disks"},
	{[]string{"imagestore/origin"}, []string{"api", "block", "imagestore/archive"},
		"an origin supplies a stream; it knows neither the formats in it nor the disk that it fills"},
	{[]string{"imagestore/importer"},
		[]string{"api", "block", "imagestore/archive", "imagestore/format", "imagestore/origin"},
		"the importer fills one disk from one stream; it knows no object of the API server"},
	{[]string{"replicas/planner"}, []string{"api", "block"},
		"the planner decides from API objects alone; it shares no type with the nodes that carry decisions out"},
	{[]string{"replicas/disks"}, []string{"api", "block", "replicas/stack"},
		"disks opens what stack keeps on a disk; it knows neither decisions nor attached volumes"},
	{[]string{"replicas/stack"}, []string{"api", "block"},
		"a stack is one replica on one disk; it knows neither engines nor other nodes"},
	{[]string{"replicas/engine"}, []string{"api", "block", "replicas/stack"},
		"an engine knows its members only through its interfaces; it knows neither connections nor devices"},
	{[]string{"replicas/peer"}, []string{"api", "block", "replicas/stack"},
		"peer carries the calls of a replica to another node; it knows neither engines nor the API server"},
	{[]string{"replicas/device"}, []string{"api", "block"},
		"a device turns the kernel's requests into requests of block; it knows no replica"},
	{[]string{"replicas/protocol"}, nil, "the model of the protocol shares no code with what it proves"},
	{[]string{"replicas/host/maintain"}, []string{"api", "block", "replicas/stack"},
		"maintenance works on the layers of disks; it knows engines and volume locks only through its interface Node"},
	{[]string{"replicas/host/attempts"}, nil, "a record of attempts knows no more of an object than its key"},
	{[]string{"replicas/host/volumelock"}, nil, "a lock knows no more of a volume than its name"},
	{[]string{"replicas/host/iothreads"}, []string{"api", "block", "replicas/engine", "replicas/stack"},
		"I/O threads carry engines; they know neither sessions nor objects"},
	{[]string{"replicas/host/localnode"}, []string{"api", "block", "replicas/disks", "replicas/engine", "replicas/stack",
		"replicas/host/iothreads", "replicas/host/volumelock"},
		"localnode has what all owners share; it knows no owner"},
	{[]string{"replicas/host/remote"}, []string{"api", "block", "replicas/disks", "replicas/engine", "replicas/peer",
		"replicas/sources", "replicas/stack", "replicas/host/iothreads", "replicas/host/localnode",
		"replicas/host/volumelock"},
		"remote serves replicas of this node; it knows neither sessions nor devices"},
	{[]string{"replicas/stack/format"}, []string{"api", "block"},
		"a format is bytes and their meaning; it knows neither disks nor layers"},
	{[]string{"replicas/host/replica"}, []string{"api", "block", "replicas/disks", "replicas/engine", "replicas/peer",
		"replicas/sources", "replicas/stack", "replicas/host/iothreads", "replicas/host/localnode",
		"replicas/host/maintain", "replicas/host/remote", "replicas/host/volumelock"},
		"replica reconciles Replicas; it knows attached volumes and snapshots only through its own interfaces"},
	{[]string{"replicas/host/snapshot"}, []string{"api", "block", "replicas/disks", "replicas/engine", "replicas/stack",
		"replicas/host/iothreads", "replicas/host/localnode", "replicas/host/maintain", "replicas/host/volumelock"},
		"snapshot reconciles Snapshots; it knows devices and replicas only through its own interfaces"},
	{[]string{"replicas/host/attach"}, []string{"api", "block", "replicas/device", "replicas/disks", "replicas/engine",
		"replicas/peer", "replicas/sources", "replicas/stack", "replicas/host/attempts", "replicas/host/iothreads",
		"replicas/host/localnode", "replicas/host/maintain", "replicas/host/remote", "replicas/host/volumelock"},
		"attach reconciles Attachments; it knows replicas and snapshots only through its own interfaces"},
	{[]string{"replicas/stack/diskfs"}, []string{"api", "block", "replicas/stack/format"},
		"diskfs asks the file system of a disk; it knows neither layers nor replicas"},
	{[]string{"replicas/stack/layer"}, []string{"api", "block", "replicas/stack/format", "replicas/stack/diskfs"},
		"a layer is immutable; it knows the records that name it only through its interfaces"},
	{[]string{"replicas/stack/transfer"},
		[]string{"api", "block", "replicas/stack/format", "replicas/stack/diskfs", "replicas/stack/layer"},
		"a transfer moves the content of layers; the stack tells it which"},
	{[]string{"replicas/sources"}, []string{"api", "block", "replicas/stack"},
		"sources reads layers where it is told to; it knows neither replicas nor the API server"},
	{[]string{"replicas"}, []string{"api", "block"}, "rooms meet in the API objects and in block, never by import"},
	{[]string{"backups"}, []string{"api", "block"}, "rooms meet in the API objects and in block, never by import"},
	{[]string{"backups/planner"}, []string{"api", "block"},
		"the planner decides from API objects alone; it shares no type with the nodes that carry decisions out"},
	{[]string{"backups/host"},
		[]string{"api", "block", "backups/target", "backups/repo", "backups/tags", "backups/manifest",
			"backups/mover", "backups/longhorn"},
		"the host carries decisions out that it reads from API objects, never from the planner"},
	{[]string{"backups/target"}, []string{"api", "block"}, "a store keeps objects by name; it knows nothing of their content"},
	{[]string{"backups/repo"}, []string{"api", "block", "backups/target"},
		"a repository is blobs in a store; it knows neither volumes nor the API server"},
	{[]string{"backups/manifest"}, []string{"api", "block", "backups/target", "backups/repo"},
		"a manifest is folders in a repository; it knows neither sources nor the API server"},
	{[]string{"backups/mover"}, []string{"api", "block", "backups/target", "backups/repo", "backups/manifest"},
		"a mover copies bytes; it knows neither replicas nor the API server"},
	{[]string{"backups/tags"}, []string{"api"}, "tags are words and their meaning; they know no store"},
	{[]string{"backups/longhorn"}, []string{"api", "block", "backups/target"},
		"longhorn reads files of a store; it knows neither repositories nor the API server"},
	{[]string{"backups/host/targets"},
		[]string{"api", "block", "backups/target", "backups/repo", "backups/tags", "backups/longhorn"},
		"targets looks after repositories; it knows neither the content of backups nor volumes"},
	{[]string{"backups/repo/tree"}, []string{"api", "backups/repo/blob"}, "a tree is bytes; it knows no store"},
	{[]string{"backups/repo/blob"}, []string{"api"}, "a blob is sealed bytes; it knows neither packs nor stores"},
	{[]string{"backups/repo/keys", "backups/repo/pack"}, []string{"api", "backups/repo/blob"},
		"key files and packs are bytes; they know no store"},
	{[]string{"backups/repo/index"}, []string{"api", "backups/repo/blob", "backups/repo/pack"},
		"the index is bytes and a local file; it knows no store"},
	{[]string{"driver/kubeapi"}, []string{"api", "block"}, "the API server knows objects only"},
	{[]string{"driver/cli"}, []string{"api", "block", "backups/repo/keys", "backups/repo/blob"},
		"commands know objects only, and the key file that a person gets"},
}

// breach is the first forbidden import of p, or "".
func breach(p golist) (dep, why string) {
	for _, w := range walls {
		for _, root := range w.of {
			if !underAny(p.ImportPath, root) {
				continue
			}
			for _, d := range p.Deps {
				if under(d, module) && !underAny(d, root) && !underAny(d, w.may...) {
					return d, w.why
				}
			}
		}
	}
	return "", ""
}

func TestWalls(t *testing.T) {
	ours, standard := packages(t)
	for _, p := range ours {
		if dep, why := breach(p); dep != "" {
			t.Errorf("%s must not import %s: %s", p.ImportPath, dep, why)
		}
		for _, i := range p.Imports {
			if strings.HasPrefix(i, module+"/replicas/stack/") && !underAny(p.ImportPath, "replicas/stack") {
				t.Errorf("%s must not import %s: other rooms import replicas/stack alone", p.ImportPath, i)
			}
		}
		if underAny(p.ImportPath, "block") {
			for _, d := range p.Deps {
				xsys := under(d, "golang.org/x/sys") && underAny(p.ImportPath, "block/uring", "block/file")
				if !standard[d] && !under(d, module) && !xsys {
					t.Errorf("%s must not import %s: block is standard library only (file and uring: also golang.org/x/sys)", p.ImportPath, d)
				}
			}
		}
		if underAny(p.ImportPath, "imagestore", "replicas", "backups", "identity", "controller", "node", "block", "api") {
			for _, d := range p.Deps {
				if strings.HasPrefix(d, "k8s.io/apiserver") || strings.HasPrefix(d, "go.etcd.io/etcd/server") {
					t.Errorf("%s must not import %s: only driver/kubeapi knows the server", p.ImportPath, d)
				}
			}
		}
		for _, bad := range []string{"util", "utils", "common", "helpers", "helper", "types", "misc", "shared"} {
			if p.Name == bad || slices.Contains(strings.Split(p.ImportPath, "/"), bad) {
				t.Errorf("%s: a package is named for what it owns, not %q", p.ImportPath, bad)
			}
		}
	}
}

// TestWallsRefuse: the walls refuse the imports that they should refuse; a typing error in the table would let
// everything through.
func TestWallsRefuse(t *testing.T) {
	for _, c := range []struct {
		pkg, dep string
		breach   bool
	}{
		{"api", "block", true},
		{"controller", "replicas/stack", true},
		{"driver/cli", "backups/repo", true},
		{"driver/cli", "backups/repo/keys", false},
		{"controller", "api", false},
		{"imagestore/format/qcow2", "replicas", true},
		{"imagestore/format/qcow2", "imagestore/format/inflate", false},
		{"imagestore/format/qcow2", "imagestore/importer", true},
		{"imagestore/format/qcow2", "imagestore/origin", true},
		{"imagestore/archive", "imagestore/format", true},
		{"imagestore/origin/registry", "imagestore/archive", false},
		{"imagestore/origin/registry", "imagestore/format/qcow2", true},
		{"imagestore/origin/registry", "imagestore/importer", true},
		{"imagestore/importer", "imagestore/format/qcow2", false},
		{"imagestore/importer", "imagestore/origin", false},
		{"imagestore/importer", "imagestore/host", true},
		{"imagestore/planner", "imagestore/host", true},
		{"imagestore/planner", "imagestore/importer", true},
		{"imagestore/planner", "imagestore/origin", true},
		{"imagestore/planner", "imagestore", true},
		{"imagestore/planner", "api/watch", false},
		{"imagestore/host", "imagestore/planner", true},
		{"imagestore/host", "imagestore/importer", false},
		{"imagestore", "imagestore/planner", false},
		{"imagestore", "imagestore/host", false},
		{"replicas/engine", "imagestore/origin", true},
		{"replicas/engine", "block/uring", false},
		{"replicas/engine", "replicas/peer", true},
		{"replicas/engine", "replicas/host/attach", true},
		{"replicas/engine", "replicas/stack", false},
		{"replicas/peer", "replicas/engine", true},
		{"replicas/peer", "replicas/host/remote", true},
		{"replicas/device", "replicas/stack", true},
		{"replicas/device", "replicas/host/attach", true},
		{"replicas/stack", "replicas/engine", true},
		{"replicas/stack", "replicas/host/maintain", true},
		{"replicas/protocol", "replicas/engine", true},
		{"block/uring", "api", true},
		{"replicas/host/maintain", "replicas/engine", true},
		{"replicas/host/maintain", "replicas", true},
		{"replicas/host/maintain", "replicas/stack", false},
		{"replicas/host/localnode", "replicas/host/replica", true},
		{"replicas/host/remote", "replicas/host/replica", true},
		{"replicas/host/replica", "replicas/device", true},
		{"replicas/host/replica", "replicas", true},
		{"replicas/host/replica", "replicas/host/remote", false},
		{"replicas/host/replica", "replicas/host/snapshot", true},
		{"replicas/host/snapshot", "replicas/host/replica", true},
		{"replicas/host/snapshot", "replicas/device", true},
		{"replicas/host/snapshot", "replicas/engine", false},
		{"replicas/host/attach", "replicas/host/replica", true},
		{"replicas/host/attach", "replicas/host/snapshot", true},
		{"replicas/host/attach", "replicas", true},
		{"replicas/host/attach", "replicas/device", false},
		{"replicas/host/replica", "replicas/host/attach", true},
		{"replicas/host/snapshot", "replicas/host/attach", true},
		{"replicas/planner", "replicas/stack", true},
		{"replicas/planner", "replicas/engine", true},
		{"replicas/planner", "replicas/peer", true},
		{"replicas/planner", "replicas/device", true},
		{"replicas/planner", "replicas", true},
		{"replicas/planner", "api/watch", false},
		{"replicas/planner", "replicas/disks", true},
		{"replicas/disks", "replicas/planner", true},
		{"replicas/disks", "replicas/engine", true},
		{"replicas/disks", "replicas/peer", true},
		{"replicas/disks", "replicas/device", true},
		{"replicas/disks", "replicas", true},
		{"replicas/disks", "replicas/stack", false},
		{"replicas/stack/format", "replicas/stack", true},
		{"replicas/stack/format", "replicas/disks", true},
		{"replicas/stack/format", "replicas/stack/layer", true},
		{"replicas/stack/diskfs", "replicas/stack/layer", true},
		{"replicas/stack/diskfs", "replicas/stack/format", false},
		{"replicas/stack/layer", "replicas/stack/transfer", true},
		{"replicas/stack/layer", "replicas/stack", true},
		{"replicas/stack/layer", "replicas/stack/diskfs", false},
		{"replicas/stack/transfer", "replicas/stack", true},
		{"replicas/stack/transfer", "replicas/stack/layer", false},
		{"replicas/stack/format", "block/file", false},
		{"replicas/stack", "replicas/stack/format", false},
		{"replicas/sources", "replicas/disks", true},
		{"replicas/sources", "replicas/stack", false},
		{"replicas", "replicas/planner", false},
		{"replicas", "replicas/disks", false},
		{"backups", "replicas", true},
		{"backups", "backups/planner", false},
		{"backups/planner", "api/watch", false},
		{"backups/planner", "backups/host", true},
		{"backups/planner", "backups/repo", true},
		{"backups/planner", "backups", true},
		{"backups/host", "backups/planner", true},
		{"backups/host", "replicas/stack", true},
		{"backups/host", "backups/mover", false},
		{"backups/mover", "backups/host", true},
		{"backups/target", "backups/repo", true},
		{"backups/target/s3", "block", false},
		{"backups/target/address", "backups/target/bounded", false},
		{"backups/target/address", "backups/repo", true},
		{"backups/repo", "backups/target", false},
		{"backups/repo/index", "backups/repo/pack", false},
		{"backups/repo/index", "backups/target", true},
		{"backups/repo/pack", "backups/repo/index", true},
		{"backups/repo/tree", "backups/repo/index", true},
		{"backups/repo", "backups/manifest", true},
		{"backups/manifest", "backups/repo", false},
		{"backups/manifest", "backups/mover", true},
		{"backups/mover", "backups/manifest", false},
		{"driver", "replicas", false},
		{"driver/cli", "replicas", true},
	} {
		dep, _ := breach(golist{ImportPath: module + "/" + c.pkg, Deps: []string{"fmt", module + "/" + c.dep}})
		if (dep != "") != c.breach {
			t.Errorf("%s importing %s: breach %v, want %v", c.pkg, c.dep, dep != "", c.breach)
		}
	}
}
