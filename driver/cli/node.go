package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli/describe"
	"drover.io/drover/driver/cli/disks"
	"drover.io/drover/driver/cli/machine"
	"drover.io/drover/driver/cli/text"
)

func (a *app) nodeCommand() *cobra.Command {
	c := groupCommand("node", "Machines that hold replicas and images", "nodes")
	c.AddCommand(
		&cobra.Command{
			Use: "list", Short: "List the nodes", Aliases: []string{"ls"}, Args: checkArgs(cobra.NoArgs),
			RunE: func(cmd *cobra.Command, _ []string) error {
				ctx, done := a.withTimeout(cmd)
				defer done()
				c, err := a.newClient()
				if err != nil {
					return err
				}
				var list api.NodeList
				if err := c.List(ctx, &list); err != nil {
					return explain(ctx, err)
				}
				return a.printList(cmd.OutOrStdout(), &list, "NAME READY DISKS CAPACITY AVAILABLE KERNEL VERSION AGE",
					func(o runtime.Object) []string {
						n := o.(*api.Node)
						return []string{n.Name, describe.NodeReady(n), fmt.Sprint(len(n.Spec.Disks)), n.Status.Capacity,
							n.Status.Available, n.Status.Kernel, n.Status.Version, text.Age(n.CreationTimestamp)}
					})
			},
		},
		&cobra.Command{
			Use: "show [NAME]", Short: "Show a node and its disks (default: this one)", Args: checkArgs(cobra.MaximumNArgs(1)),
			ValidArgsFunction: a.completeNames(nodes, true),
			RunE: func(cmd *cobra.Command, left []string) error {
				ctx, done := a.withTimeout(cmd)
				defer done()
				c, err := a.newClient()
				if err != nil {
					return err
				}
				n, err := nodeOf(ctx, c, strings.Join(left, ""))
				if err != nil {
					return err
				}
				rest, err := disks.EvictionRows(ctx, c, n)
				if err != nil {
					return explain(ctx, err)
				}
				return a.printObject(cmd.OutOrStdout(), n, func(w io.Writer) {
					describe.Node(w, n)
					if len(rest) > 0 {
						fmt.Fprintln(w, "\nStill there:")
						_ = text.Table(w, "KIND NAME DISK MESSAGE", rest)
					}
				})
			},
		},
		a.nodeDrain(), a.nodeSet())
	return c
}

// nodeOf reads the named node, or this machine's node for an empty name.
func nodeOf(ctx context.Context, c client.Client, name string) (*api.Node, error) {
	if name == "" {
		var err error
		if name, err = machine.Node(ctx, c); err != nil {
			return nil, explain(ctx, err)
		}
	}
	var n api.Node
	return &n, getObject(ctx, c, "node", name, &n)
}

func (a *app) diskCommand() *cobra.Command {
	c := groupCommand("disk", "Folders, usually file systems of their own, that hold the data", "disks")
	c.AddCommand(a.diskList(), a.diskAdd(), a.diskEvict(), a.diskRemove())
	return c
}

func (a *app) diskList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the disks of all nodes", Aliases: []string{"ls"}, Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			var list api.NodeList
			if err := c.List(ctx, &list); err != nil {
				return explain(ctx, err)
			}
			var all []disks.Disk
			for _, n := range list.Items {
				all = append(all, disks.OnNode(&n)...)
			}
			switch a.output {
			case "table", "wide":
				var rows [][]string
				for _, d := range all {
					left := ""
					if d.Spec.EvictionRequested && d.Status.UID != "" {
						vols, imgs, err := disks.Names(ctx, c, d.Status.UID)
						if err != nil {
							return explain(ctx, err)
						}
						left = stillHolds(vols, imgs)
					}
					rows = append(rows, describe.DiskRow(&d, left))
				}
				return text.Table(cmd.OutOrStdout(), describe.DiskHeader, rows)
			case "name":
				for _, d := range all {
					fmt.Fprintf(cmd.OutOrStdout(), "%s:%s\n", d.Node, d.Spec.Path)
				}
				return nil
			}
			out := make([]map[string]any, 0, len(all)) // a disk is no API object
			for _, d := range all {
				out = append(out, map[string]any{"node": d.Node, "spec": d.Spec, "status": d.Status})
			}
			return a.encodeValue(cmd.OutOrStdout(), out)
		},
	}
}

func (a *app) diskAdd() *cobra.Command {
	var node, diskTags, reserved string
	c := &cobra.Command{
		Use: "add PATH", Short: "Give a node a folder to keep data in, after a check of its file system",
		Args: checkArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			path, err := filepath.Abs(left[0])
			if err != nil {
				return err
			}
			spec := api.DiskSpec{Path: path, Tags: parseTags(diskTags)}
			if reserved != "" {
				if spec.ReservedBytes, err = parseSize(reserved); err != nil {
					return err
				}
			}
			n, err := nodeOf(ctx, c, node)
			if err != nil {
				return err
			}
			n, err = editNode(ctx, c, n.Name, func(n *api.Node) error {
				if slices.ContainsFunc(n.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == path }) {
					return api.Errorf(api.Exists, "node %q has a disk at %s already", n.Name, path)
				}
				n.Spec.Disks = append(n.Spec.Disks, spec)
				return nil
			})
			if err != nil {
				return err
			}
			d, err := awaitDisk(ctx, c, n.Name, path)
			if err != nil {
				return err
			}
			a.printDiskOutcome(cmd, n.Name, path, fmt.Sprintf("added to node %q: %s, %s free", n.Name, d.FSType,
				api.SizeText(d.Available)))
			if d.FSType == "tmpfs" {
				fmt.Fprintf(cmd.ErrOrStderr(), "disk %q is memory: its data is lost when the machine stops\n", path)
			}
			return nil
		},
	}
	c.Flags().StringVar(&node, "node", "", "node (default: this one)")
	c.Flags().StringVar(&diskTags, "tags", "", "tags for disk selectors: ssd,fast")
	c.Flags().StringVar(&reserved, "reserved", "", "leave this much free for others: 20Gi")
	return c
}

// editNode changes a node. The node writes its status all the time, so change always sees the newest version.
func editNode(ctx context.Context, c client.Client, name string, change func(*api.Node) error) (*api.Node, error) {
	n, err := await.Edit(ctx, c, name, func(n *api.Node) (bool, error) {
		err := change(n)
		return err == nil, err
	})
	if apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.NotFound, "node %q does not exist: `drover node list` shows all", name)
	}
	return n, explain(ctx, err)
}

// awaitDisk waits for the node's verdict, and removes a refused disk from the spec.
func awaitDisk(ctx context.Context, c client.WithWatch, node, path string) (api.DiskStatus, error) {
	var verdict api.DiskStatus
	gone := api.Errorf(api.NotFound, "node %q was deleted meanwhile", node)
	_, err := awaitObject(ctx, c, node, gone, func(n *api.Node) (bool, error) {
		for _, d := range n.Status.Disks {
			if d.Path == path && (d.Ready || d.Message != "") {
				verdict = d
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil {
		return verdict, explainTimeout(err, "node %q has not looked at %s yet", node, path)
	}
	if !verdict.Ready {
		refused := api.Errorf(api.Invalid, "node %q refuses %s as a disk: %s", node, path, verdict.Message)
		return verdict, errors.Join(refused, dropDisk(ctx, c, node, path))
	}
	return verdict, nil
}

func dropDisk(ctx context.Context, c client.Client, node, path string) error {
	_, err := editNode(ctx, c, node, func(n *api.Node) error {
		n.Spec.Disks = slices.DeleteFunc(n.Spec.Disks, func(d api.DiskSpec) bool { return d.Path == path })
		return nil
	})
	return err
}

func (a *app) diskEvict() *cobra.Command {
	var node string
	var undo bool
	c := &cobra.Command{
		Use: "evict PATH|UID", Short: "Place no new replicas and images on a disk, and move its data away",
		Long: "Marks a disk for eviction: Drover places no new replicas and images on the disk and moves its contents " +
			"to other\ndisks, the only replica of a volume once the volume is detached. Prints the volumes and images " +
			"that the disk still\nhas. `drover disk remove` takes the empty disk away.",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeDisks,
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			d, err := disks.Find(ctx, c, node, left[0])
			if err != nil {
				return explain(ctx, err)
			}
			if _, err := editNode(ctx, c, d.Node, func(n *api.Node) error {
				for i := range n.Spec.Disks {
					if n.Spec.Disks[i].Path == d.Spec.Path {
						take := undo
						n.Spec.Disks[i].EvictionRequested, n.Spec.Disks[i].Schedulable = !undo, &take
					}
				}
				return nil
			}); err != nil {
				return err
			}
			if undo {
				a.printDiskOutcome(cmd, d.Node, d.Spec.Path, "is in use again")
				return nil
			}
			vols, imgs, err := disks.Names(ctx, c, d.Status.UID)
			if err != nil {
				return explain(ctx, err)
			}
			a.printDiskOutcome(cmd, d.Node, d.Spec.Path, "takes no new replicas and "+
				"images"+stillHolds(vols, imgs)+whatMoves(vols, imgs))
			return nil
		},
	}
	c.Flags().StringVar(&node, "node", "", "node, where several have a disk of that path")
	c.Flags().BoolVar(&undo, "undo", false, "take the wish back")
	return c
}

// whatMoves says where the content of an evicted disk moves, and whether the user must act.
func whatMoves(vols, imgs []string) string {
	text := ""
	if len(imgs) > 0 {
		text += ". Images that no volume here needs move to other disks with room by themselves"
	}
	if len(vols) > 0 {
		text += ". Replicas move to disks with room; the only replica of a volume moves when the volume is detached"
	}
	return text
}

func stillHolds(vols, imgs []string) string {
	var what []string
	if len(vols) > 0 {
		what = append(what, someOf("volume", vols))
	}
	if len(imgs) > 0 {
		what = append(what, someOf("image", imgs))
	}
	if len(what) == 0 {
		return "; it is empty"
	}
	return "; on it: " + strings.Join(what, "; ")
}

// forgottenImages names the images that the API forgets with a dead disk.
func forgottenImages(imgs []string) string {
	if len(imgs) == 0 {
		return ""
	}
	return fmt.Sprintf("; the API forgets its content: %s", someOf("image", imgs))
}

// dependentVolumes returns the volumes that need a disk: undeleted volumes with a member on the disk, or with a replica
// there that may become the first member. No volume needs a replaced replica while a ready member exists; without ready
// members, salvage may need the replica. For dead see readyDisks.
func dependentVolumes(ctx context.Context, c client.Client, uid api.UID, dead string) (names []string, err error) {
	var reps api.ReplicaList
	if err := c.List(ctx, &reps, client.MatchingLabels{api.LabelDisk: string(uid)}); err != nil {
		return nil, explain(ctx, err)
	}
	isThere, err := replicasThere(ctx, c, dead)
	if err != nil {
		return nil, err
	}
	for _, r := range reps.Items {
		var v api.Volume
		err := c.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v)
		if apierrors.IsNotFound(err) || err == nil && v.DeletionTimestamp != nil {
			continue
		}
		if err != nil {
			return nil, explain(ctx, err)
		}
		if slices.Contains(v.Status.Members, r.Name) || !slices.ContainsFunc(v.Status.Members, isThere) {
			names = append(names, v.Name)
		}
	}
	return names, nil
}

// replicasThere returns a function that reports by name whether a replica's disk is ready, on a living node.
func replicasThere(ctx context.Context, c client.Client, dead string) (func(name string) bool, error) {
	var reps api.ReplicaList
	ready, err := disks.Ready(ctx, c, dead)
	if err == nil {
		err = c.List(ctx, &reps)
	}
	if err != nil {
		return nil, explain(ctx, err)
	}
	return func(name string) bool {
		return slices.ContainsFunc(reps.Items, func(r api.Replica) bool { return r.Name == name && ready[r.Spec.Disk] })
	}, nil
}

// awaitForgotten waits until a node no longer lists a disk.
func awaitForgotten(ctx context.Context, c client.WithWatch, node string, uid api.UID) error {
	gone := api.Errorf(api.NotFound, "node %q was deleted meanwhile", node)
	_, err := awaitObject(ctx, c, node, gone, func(n *api.Node) (bool, error) {
		return !slices.ContainsFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.UID == uid }), nil
	})
	return explainTimeout(err, "node %q has not forgotten disk %s yet", node, uid)
}

func (a *app) diskRemove() *cobra.Command {
	var node string
	var deadNode, force bool
	c := &cobra.Command{
		Use: "remove PATH|UID", Short: "Take an empty disk away from its node; its files stay", Aliases: []string{"rm"},
		Long: "Takes a disk away from its node. The disk must be empty, or must not answer while no volume needs it: " +
			"then the API\nforgets its content. A node without a sign of life for 40 s counts as dead; --dead-node " +
			"declares a node dead before,\nand fails at a sign of life. The API forgets the last copy of an image without " +
			"another origin with --force only.",
		Args: checkArgs(cobra.ExactArgs(1)), ValidArgsFunction: a.completeDisks,
		RunE: func(cmd *cobra.Command, left []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			d, err := disks.Find(ctx, c, node, left[0])
			if err != nil {
				return explain(ctx, err)
			}
			dead, err := isDead(ctx, c, d.Node, deadNode)
			if err != nil {
				return err
			}
			what, waits, deadName := "", false, ""
			if dead {
				deadName = d.Node
			}
			elsewhere, err := disks.IsElsewhere(ctx, c, d, dead)
			if err != nil {
				return explain(ctx, err)
			}
			if d.Status.UID != "" && !elsewhere {
				vols, imgs, err := disks.Names(ctx, c, d.Status.UID)
				if err != nil {
					return explain(ctx, err)
				}
				if d.Status.Ready && !dead && len(vols)+len(imgs) > 0 {
					return api.Errorf(api.InUse, "disk %s is not empty%s: `drover disk evict` moves it to "+
						"other disks; --dead-node, if node %q is no more", d.Spec.Path, stillHolds(vols, imgs), d.Node)
				}
				waits = !dead && len(vols)+len(imgs) > 0
				if vols, err = dependentVolumes(ctx, c, d.Status.UID, deadName); err != nil {
					return err
				}
				if len(vols) > 0 {
					why := "is not ready"
					if dead {
						why = fmt.Sprintf("does not answer, as node %q is dead", d.Node)
					}
					return api.Errorf(api.InUse, "disk %s %s, and volumes need its replicas%s: bring the disk back, let "+
						"`drover disk evict` replace replicas that other disks have too, or give the volumes up with `drover "+
						"volume delete`", d.Spec.Path, why, stillHolds(vols, nil))
				}
				last, err := disks.LastCopies(ctx, c, d, deadName)
				switch {
				case err != nil:
					return explain(ctx, err)
				case len(last) > 0 && !force:
					return api.Errorf(api.InUse, "disk %s has the last copy of %s, which would be forgotten: bring the disk back, "+
						"or give the copy up with --force", d.Spec.Path, someOf("image", last))
				}
				what = forgottenImages(imgs)
			}
			if err := dropDisk(ctx, c, d.Node, d.Spec.Path); err != nil {
				return err
			}
			if dead && d.Status.UID != "" && !elsewhere {
				if err := disks.Forget(ctx, c, d); err != nil {
					return explain(ctx, err)
				}
			}
			if waits { // the path is free once the node has forgotten the disk
				if err := awaitForgotten(ctx, c, d.Node, d.Status.UID); err != nil {
					return err
				}
			}
			a.printDiskOutcome(cmd, d.Node, d.Spec.Path, fmt.Sprintf("removed from node %q%s", d.Node, what))
			return nil
		},
	}
	c.Flags().StringVar(&node, "node", "", "node, where several have a disk of that path")
	c.Flags().BoolVar(&deadNode, "dead-node", false, "its node is dead, and never comes back with it")
	c.Flags().BoolVar(&force, "force", false, "forget the last copies of images, too")
	return c
}
