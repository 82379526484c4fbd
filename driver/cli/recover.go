package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

// RecoverOptions are the options of `drover recover`.
type RecoverOptions struct {
	Disks       []string // folders to read; empty: the disks of this machine's nodes
	Apply       bool     // apply the findings; otherwise only report
	RaiseEpochs bool
	DeadNodes   []string // the user declares the nodes dead: their reports on disks do not count
	NoWait      bool     // do not wait until the reconcilers use the created objects
}

// States of a Finding.
const (
	FoundThere    = "there"    // disk and API agree
	FoundMissing  = "missing"  // on a disk, but not in the API
	FoundBehind   = "behind"   // the API knows an older epoch than the disk
	FoundMoved    = "moved"    // another node has the disk now
	FoundStale    = "stale"    // a replica that is no longer a member
	FoundLost     = "lost"     // in the API, but not on its disk
	FoundConflict = "conflict" // disk and API contradict each other: a person must decide
	FoundDamaged  = "damaged"  // unreadable, or not whole
)

// Finding is an object on a disk or in the API, and recovery's action on the object.
type Finding struct {
	Kind   string  `json:"kind"`
	Name   string  `json:"name"`
	UID    api.UID `json:"uid,omitempty"`
	Disk   string  `json:"disk,omitempty"` // path
	State  string  `json:"state"`
	Action string  `json:"action,omitempty"` // create, raise epoch, move; done: created, raised, moved
	Note   string  `json:"note,omitempty"`
}

// Recoverer compares disks with objects and, with Apply, creates the missing objects. Recoverer returns all findings,
// also with an error.
type Recoverer func(ctx context.Context, c client.WithWatch, o RecoverOptions) ([]Finding, error)

// Restorer replaces the API's state in a state folder by a snapshot, and returns the path of the former state.
type Restorer func(stateDir, snapshot string) (aside string, err error)

// RecoverCommand is `drover recover`. The caller supplies the work, which needs rooms that this package may not import.
func RecoverCommand(run Recoverer, restore Restorer) *cobra.Command {
	a := &app{}
	var o RecoverOptions
	var snapshot, stateDir string
	c := &cobra.Command{
		Use: "recover", Short: "Rebuild images and volumes in the API from the records on the disks of this machine",
		Long: "Reads the disks of this machine and compares their records with the objects of the API server: after the " +
			"state was\nlost or restored from an old copy, or when a disk came from another machine. The command prints a " +
			"plan; with --yes it\ncreates the missing objects with their old UIDs. The command deletes no object, and " +
			"touches no data.",
		Example: "  drover recover\n  drover recover --yes\n  drover recover --disk /mnt/a --yes --raise-epochs",
		Args:    checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if snapshot != "" {
				return a.restoreState(cmd, restore, stateDir, snapshot, o)
			}
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			all, err := run(ctx, c, o)
			if perr := a.printFound(cmd, all); perr != nil {
				return perr
			}
			if err != nil {
				return explain(ctx, err)
			}
			return reportRemaining(cmd, all, o)
		},
	}
	f := c.Flags()
	f.StringArrayVar(&o.Disks, "disk", nil, "folder of a disk to read; several times for several\n"+
		"(default: all disks of this machine's nodes)")
	f.BoolVar(&o.Apply, "yes", false, "do it")
	f.BoolVar(&o.RaiseEpochs, "raise-epochs", false, "take the disk's epoch if the API has an older epoch")
	f.StringArrayVar(&o.DeadNodes, "dead-node", nil,
		"node that exists no more: the disks of that node belong to other nodes now;\nrefused if the node gives a sign "+
			"of life (a node without one for 40 s need not be named)")
	f.StringVar(&snapshot, "restore-state", "", "with drover serve stopped: replace the API's state by this snapshot\n"+
		"(<state-dir>/etcd-snapshots/state-*.db); then start drover serve, and recover")
	f.StringVar(&stateDir, "state-dir", DefaultStateDir, "folder of the state to restore")
	a.addFlags(c.PersistentFlags())
	a.completeFlags(c)
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%w; see `%s --help`", err, c.CommandPath())
	})
	silenceErrors(c)
	return c
}

// restoreState works on a machine whose API server is stopped, so restoreState sends no request.
func (a *app) restoreState(cmd *cobra.Command, restore Restorer, dir, snapshot string, o RecoverOptions) error {
	if err := a.checkOutput(); err != nil {
		return err
	}
	switch {
	case len(o.Disks) > 0 || o.RaiseEpochs || len(o.DeadNodes) > 0:
		return usagef("--restore-state is a step of its own: start `drover serve` after it, then recover from disks")
	case !o.Apply:
		fmt.Fprintf(cmd.ErrOrStderr(), "Nothing was changed. With --yes snapshot %[2]s replaces the state in %[1]s.\n",
			dir, snapshot)
		return nil
	}
	aside, err := restore(dir, snapshot)
	if err != nil {
		return err
	}
	switch w := cmd.OutOrStdout(); {
	case a.output == "json" || a.output == "yaml":
		if err := a.encodeValue(w, map[string]string{"restored": dir, "from": snapshot, "former": aside}); err != nil {
			return err
		}
	case aside != "" && a.output == "name":
		fmt.Fprintln(w, aside)
	case aside != "":
		fmt.Fprintf(w, "former state kept in %s\n", aside)
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "Restored. Start `drover serve`, then look with `drover recover --raise-epochs`.")
	return nil
}

func (a *app) printFound(cmd *cobra.Command, all []Finding) error {
	w := cmd.OutOrStdout()
	switch a.output {
	case "table", "wide":
		rows := make([][]string, 0, len(all))
		for _, f := range all {
			rows = append(rows, []string{f.Kind, f.Name, string(f.UID), f.Disk, f.State, f.Action, f.Note})
		}
		return text.Table(w, "KIND NAME UID DISK STATE ACTION NOTE", rows)
	case "name":
		for _, f := range all {
			fmt.Fprintf(w, "%s.%s/%s\n", strings.ToLower(f.Kind), api.GroupVersion.Group, f.Name)
		}
		return nil
	}
	return a.encodeValue(w, all)
}

// reportRemaining says which work remains, as an error if recovery skipped a finding.
func reportRemaining(cmd *cobra.Command, all []Finding, o RecoverOptions) error {
	todo, behind := 0, 0
	var skipped []string
	for _, f := range all {
		switch f.State {
		case FoundConflict, FoundDamaged:
			skipped = append(skipped, f.Kind+" "+f.Name)
		case FoundBehind:
			if f.Action == "" {
				behind++
			}
		}
		if f.Action != "" {
			todo++
		}
	}
	say := func(format string, args ...any) { fmt.Fprintf(cmd.ErrOrStderr(), format+"\n", args...) }
	switch {
	case todo > 0 && !o.Apply:
		say("Nothing was changed. With --yes the command makes %s.", api.CountText(todo, "change"))
	case todo > 0:
		say("%s made. Settings, tags and schedules are not on disks: see to them by hand.", api.CountText(todo, "change"))
	case len(skipped) == 0 && behind == 0:
		say("Disks and API agree: nothing to do.")
	}
	if behind > 0 {
		say("The API went back in time: %s cannot be attached before --raise-epochs.", api.CountText(behind, "volume"))
	}
	switch {
	case len(skipped) > 0:
		return api.Errorf(api.Exists, "%s skipped, a person must decide: %s", api.CountText(len(skipped), "thing"),
			strings.Join(skipped, ", "))
	case behind > 0 && o.Apply:
		return api.Errorf(api.Exists, "%s behind: repeat with --raise-epochs", api.CountText(behind, "volume"))
	}
	return nil
}
