//! A token tree as indented text.

use treespec_tree::TokenTree;

/// One line per node, children below their parent in pop order. `label` names a token; the nodes of `accepted` are
/// marked.
pub(super) fn render(
    tree: &TokenTree,
    label: impl Fn(u32) -> String,
    accepted: &[usize],
) -> String {
    let mut text = String::new();
    // Depth first with an own stack: (node, what precedes its children's branches, its own branch).
    let mut open = vec![(0, String::new(), String::new())];
    while let Some((node, indent, branch)) = open.pop() {
        text.push_str(&branch);
        text.push_str(&label(tree.tokens()[node]));
        if node != 0 {
            text.push_str(&format!("  {:.3}", tree.log_probs()[node]));
        }
        if accepted.contains(&node) {
            text.push_str("  ✓");
        }
        text.push('\n');

        let children: Vec<usize> = tree.children(node).collect();
        for (place, &child) in children.iter().enumerate().rev() {
            let last = place + 1 == children.len();
            let (corner, rail) = if last {
                ("└─ ", "   ")
            } else {
                ("├─ ", "│  ")
            };
            open.push((
                child,
                format!("{indent}{rail}"),
                format!("{indent}{corner}"),
            ));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_are_drawn_and_the_path_is_marked() {
        let mut tree = TokenTree::root_only(1);
        let left = tree.push(0, 2, -0.5).unwrap();
        let right = tree.push(0, 3, -1.0).unwrap();
        tree.push(left, 4, -1.25).unwrap();
        tree.push(right, 5, -2.0).unwrap();
        let text = render(&tree, |token| format!("t{token}"), &[left, 3]);
        assert_eq!(
            text,
            "t1\n\
             ├─ t2  -0.500  ✓\n\
             │  └─ t4  -1.250  ✓\n\
             └─ t3  -1.000\n   └─ t5  -2.000\n"
        );
    }
}
